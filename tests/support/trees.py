"""Small trees of turns, written by hand or drawn at random."""

from typing import Any

import msgspec
from hypothesis import strategies as st

from tokenproxy.record.store import Session, Store
from tokenproxy.record.turn import IndexedTurn, TellingTurn, Turn, pack_ids, pack_logprobs

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


async def add_rollouts(store: Store, *ids: str) -> None:
    """Record `rollout(id)` for each id, which is `tenant/name` or a name."""
    for name in ids:
        session = Session(id=name, tenant=name.rpartition("/")[0], created=1.0, used=1.0)
        turns = rollout(name)
        await store.add(session, [IndexedTurn(turn) for turn in turns])


_DRAWN = st.tuples(
    st.integers(0, 4),  # the turn it continues, by position; a first turn if there is none yet
    st.integers(1, 3),  # number of appended ids
    st.integers(1, 3),  # number of sampled ids
    st.sampled_from(["stop", "stop", "abort"]),
    st.sampled_from(["", "", "", "", "usage_mismatch"]),
    st.sampled_from([None, None, 0.0, 1.0]),  # its reward
)


@st.composite
def random_trees(draw: st.DrawFn) -> tuple[list[Turn], dict[str, float]]:
    """Up to ten turns with forks of all kinds, some untrainable and some aborted, and rewards by turn id.

    No two ids are equal. The names and the order of the turns do not tell which came first.
    """
    turns: list[Turn] = []
    rewards: dict[str, float] = {}
    names = draw(st.permutations("abcdefghij"))
    for name, drawn in zip(names, draw(st.lists(_DRAWN, min_size=1, max_size=10)), strict=False):
        at, appended, sampled, finish_reason, problem, reward = drawn
        parent = turns[at] if at < len(turns) else None
        fields = {"finish_reason": finish_reason, "problem": problem}
        first = 10 * len(turns)
        ids = list(range(first, first + appended)), list(range(first + appended, first + appended + sampled))
        turns.append(_turn(name, parent, *ids, fields))
        if reward is not None:
            rewards[name] = reward
    if (reward := draw(st.sampled_from([None, 1.0]))) is not None:
        rewards[""] = reward
    return sorted(turns, key=lambda turn: turn.id, reverse=True), rewards


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
    return TellingTurn(**{**usual, **fields})
