"""Small trees of turns, written by hand or drawn at random."""

from typing import Any

import msgspec
from hypothesis import strategies as st

from proxy.history.turn import Turn, pack_ids, pack_logprobs

ROLLOUT = "r"


def root(name: str, appended: list[int], completion: list[int], /, **fields: Any) -> Turn:
    """A turn that begins a conversation. Its log-probabilities are -1/8, -2/8, ... if none are given."""
    return _turn(name, None, appended, completion, fields)


def child(name: str, parent: Turn, appended: list[int], completion: list[int], /, **fields: Any) -> Turn:
    """A turn that continues another one."""
    return _turn(name, parent, appended, completion, fields)


def rollout(name: str) -> list[Turn]:
    """The turns of a rollout of this id: two branches, and a third that is refused."""
    a = root(f"{name}-a", [1, 2], [3, 4], rollout=name)
    b = child(f"{name}-b", a, [5], [6], rollout=name)
    c = child(f"{name}-c", a, [5], [7], rollout=name)
    return [a, b, c, child(f"{name}-d", a, [5], [8], rollout=name, logprobs=b"")]


@st.composite
def random_trees(draw: st.DrawFn) -> tuple[list[Turn], dict[str, float]]:
    """Up to ten turns with forks of all kinds, some untrainable and some aborted, and rewards for some.

    Ids do not tell which turn came first, and the order of the list tells nothing.
    """
    # Drawn as numbers, all sizes equally likely: drawn one by one, most trees would be too small to fork.
    count = draw(st.integers(1, 10))
    rng = draw(st.randoms(use_true_random=False))
    turns: list[Turn] = []
    for name in rng.sample("abcdefghij", count):
        fields = {
            "finish_reason": rng.choice(["stop", "stop", "abort"]),
            "problem": rng.choice(["", "", "", "", "usage_mismatch"]),
        }
        parent = rng.choice([None, *turns[:3], *turns])
        turns.append(_turn(name, parent, [7] * rng.randint(1, 3), [8] * rng.randint(1, 3), fields))
    rewarded = [name for name in ("", *(turn.id for turn in turns)) if rng.random() < 0.3]
    rng.shuffle(turns)
    return turns, {name: float(rng.randint(0, 1)) for name in rewarded}


def _turn(
    name: str, parent: Turn | None, appended: list[int], completion: list[int], fields: dict[str, Any]
) -> Turn:
    before = parent.prompt_tokens + parent.completion_tokens if parent else 0
    usual = {
        "id": name,
        "rollout": ROLLOUT,
        "parent": parent.id if parent else None,
        "request": name,
        "created": 1.0,
        "model": "m",
        "tools": None if parent else b"",
        "template_kwargs": None if parent else b"",
        "messages": msgspec.json.encode([{"role": "user", "content": f"to {name}"}]),
        "message": msgspec.json.encode({"role": "assistant", "content": f"from {name}"}),
        "appended": pack_ids(appended),
        "completion": pack_ids(completion),
        "logprobs": pack_logprobs([-(i + 1) / 8 for i in range(len(completion))]),
        "logprobs_mode": "raw_logprobs",
        "prompt_tokens": before + len(appended),
        "source": "extended" if parent else "rendered",
        "finish_reason": "stop",
    }
    return Turn(**{**usual, **fields})
