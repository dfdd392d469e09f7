"""The matcher on its own: long conversations, large groups, prefixes of ids."""

import json
from typing import Any, get_args

import pytest

from proxy.history.conversation import Asked, Digester, Setting
from proxy.history.evidence import Outcome, Sampled
from proxy.history.known import KnownTurns
from proxy.history.matcher import Kind, Match, Matcher, index_key
from proxy.history.plan import Plan
from proxy.history.recording import recorded
from proxy.history.store import FOUND_AT_MOST, Limits
from proxy.stores.memory import MemoryStore
from tokenization import ids

Message = dict[str, Any]


class Record:
    """A store with what was sampled, and a matcher that has nothing at hand but it."""

    def __init__(self) -> None:
        self.store = MemoryStore(Limits())
        self.looked_up = 0
        self._digester = Digester()

    async def add(
        self,
        messages: list[Message],
        message: Message,
        prompt: list[int],
        sampled: list[int],
        session: str = "s",
    ) -> str:
        """Record a turn that continues none."""
        asked = Asked(json.dumps(messages).encode(), Setting(), None, session)
        plan = Plan(asked, self._digester.read(asked, "m"), "m", session)
        outcome = Outcome(ids.dump(prompt), [Sampled(0, message, sampled, [0.0] * len(sampled), "stop")])
        (one,) = recorded(plan, outcome)
        await self.store.add([one.turn], [one.keys])
        return one.turn.id

    async def match(self, messages: list[Message], session: str | None = "s") -> Match:
        """What a request continues."""
        asked = Asked(json.dumps(messages).encode(), Setting(), None, session)
        return await Matcher(self.store, KnownTurns(2**20)).match(self._digester.read(asked, "m"), session)


def _said(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def _asked(text: str) -> Message:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("edited", [1, 2, 63, 64, 65, 66, 200])
async def test_a_turn_far_behind_is_found(edited: int) -> None:
    """However many of the newest messages were never recorded."""
    record = Record()
    turn = await record.add([_asked("Hi")], _said("hello"), [5], [6])
    behind = [message for n in range(edited) for message in (_asked("more"), _said(f"unknown {n}"))]
    found = await record.match([_asked("Hi"), _said("hello"), *behind, _asked("end")])
    assert found.known is not None
    assert (found.known.turn, found.end, found.reason) == (turn, 1, "history_edited")
    assert json.loads(found.known.raw) == [5, 6]


async def test_the_longest_wins() -> None:
    record = Record()
    await record.add([_asked("Hi")], _said("a"), [5], [6])
    longer = await record.add([_asked("Hi"), _said("a"), _asked("b")], _said("c"), [7], [8])
    await record.add([_asked("Hi")], _said("a"), [9], [9])
    found = await record.match([_asked("Hi"), _said("a"), _asked("b"), _said("c"), _asked("d")])
    assert found.known is not None
    assert (found.known.turn, found.end) == (longer, 3)


@pytest.mark.parametrize("size", [2, FOUND_AT_MOST, FOUND_AT_MOST + 1, 64])
@pytest.mark.parametrize("reasoning", [True, False])
async def test_none_of_a_group_is_lost(size: int, reasoning: bool) -> None:
    """Equal answers that the client's own spelling tells apart: by their reasoning, or by white space."""
    record = Record()
    turns = []
    for n in range(size):
        message = _said("42", reasoning=f"r{n}") if reasoning else _said("42" + " " * n)
        turns.append((message, await record.add([_asked("Hi")], message, [5], [6, n])))
    for message, turn in (turns[0], turns[-1], turns[size // 2]):
        found = await record.match([_asked("Hi"), message, _asked("more")])
        assert found.known is not None, found.reason
        assert (found.known.turn, found.candidates) == (turn, 1)


async def test_equal_ids_are_no_ambiguity() -> None:
    record = Record()
    for sampled in ([6], [6], [6]):
        await record.add([_asked("Hi")], _said("a"), [5], sampled)
    assert (await record.match([_asked("Hi"), _said("a"), _asked("b")])).candidates == 1
    newest = await record.add([_asked("Hi")], _said("a"), [5], [7])
    found = await record.match([_asked("Hi"), _said("a"), _asked("b")])
    assert found.known is not None
    assert (found.known.turn, found.candidates) == (newest, 2)


async def test_sessions_see_their_own_turns_only() -> None:
    record = Record()
    await record.add([_asked("Hi")], _said("a"), [5], [6], "one")
    for session in ("two", None):
        assert (await record.match([_asked("Hi"), _said("a"), _asked("b")], session)).reason == "no_match"


def test_names_and_digests_do_not_run_into_each_other() -> None:
    kinds: tuple[Kind, ...] = get_args(Kind)
    digests = (b"x" * 16, b"b" + b"x" * 15, b"\0" * 16)
    keys = {
        index_key(kind, scope, digest) for kind in kinds for scope in ("", "a", "ab") for digest in digests
    }
    assert len(keys) == len(kinds) * 3 * 3


@pytest.mark.parametrize(
    "prompt, found",
    [
        ([5, 6, 7, 8], 1),
        ([5, 6], 0),
        ([5, 60], None),
        ([5, 6, 7], 1),
        ([5, 6, 70], 0),
        ([5], None),
        ([4, 5, 6], None),
    ],
)
async def test_the_longest_prefix_of_ids(prompt: list[int], found: int | None) -> None:
    record = Record()
    turns = [
        await record.add([_asked("a")], _said("a"), [5], [6]),
        await record.add([_asked("b")], _said("b"), [5, 6], [7]),
    ]
    known = await Matcher(record.store, KnownTurns(2**20)).longest_prefix(ids.dump(prompt), "s")
    assert (known.turn if known else None) == (None if found is None else turns[found])


async def test_the_longest_prefix_in_a_wide_rollout() -> None:
    """The parent of a turn is not forgotten because others were busy meanwhile."""
    record = Record()
    turn = await record.add([_asked("a")], _said("a"), [5], [6])
    for n in range(FOUND_AT_MOST + 4):
        await record.add([_asked(f"{n}")], _said("a"), [9, n], [9])
    known = await Matcher(record.store, KnownTurns(2**20)).longest_prefix(b"[5,6,7]", "s")
    assert known is not None
    assert known.turn == turn
