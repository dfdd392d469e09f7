"""Small trees of turns, written by hand."""

from typing import Any

import msgspec

from proxy.history.turn import Turn, pack_ids, pack_logprobs

ROLLOUT = "r"


def root(name: str, appended: list[int], completion: list[int], /, **fields: Any) -> Turn:
    """A turn that begins a conversation. Its log-probabilities are -1/8, -2/8, ... if none are given."""
    return _turn(name, None, appended, completion, fields)


def child(name: str, parent: Turn, appended: list[int], completion: list[int], /, **fields: Any) -> Turn:
    """A turn that continues another one."""
    return _turn(name, parent, appended, completion, fields)


def _turn(
    name: str, parent: Turn | None, appended: list[int], completion: list[int], fields: dict[str, Any]
) -> Turn:
    before = parent.prompt_tokens + parent.completion_tokens if parent else 0
    made = {
        "id": name,
        "rollout": ROLLOUT,
        "parent": parent.id if parent else None,
        "request": name,
        "created": 1.0,
        "model": "m",
        "messages": msgspec.json.encode([{"role": "user", "content": f"to {name}"}]),
        "message": msgspec.json.encode({"role": "assistant", "content": f"from {name}"}),
        "appended": pack_ids(appended),
        "completion": pack_ids(completion),
        "logprobs": pack_logprobs([-(i + 1) / 8 for i in range(len(completion))]),
        "prompt_tokens": before + len(appended),
        "source": "extended" if parent else "rendered",
        "finish_reason": "stop",
    }
    return Turn(**{**made, **fields})
