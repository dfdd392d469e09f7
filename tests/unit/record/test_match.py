"""The matcher on its own: long conversations, large groups, equal texts, prefixes of ids."""

import asyncio
import json
from collections.abc import Callable

import pytest

from tests.support.recording import Record, assistant, chat_request, scope_of, session_ref, user
from tokenproxy.record.turn import FOUND_AT_MOST, Turn
from tokenproxy.record.vocabulary import Reason

_MORE = user("more")


@pytest.mark.parametrize("edited", [1, 65])
async def test_turn_before_many_unrecorded_ones_is_found(edited: int) -> None:
    record = Record()
    new = await record.add([user("Hi")], assistant("hello"), [5], [6])
    after = [message for n in range(edited) for message in (_MORE, assistant(f"unknown {n}"))]
    match = await record.match([user("Hi"), assistant("hello"), *after, user("end")])
    assert match.turn is not None
    assert (match.turn.id, match.end, match.reason) == (new.turn.id, 1, Reason.HISTORY_EDITED)
    assert json.loads(match.turn.ids) == [5, 6]


@pytest.mark.parametrize("kept", [1, 65])
async def test_longest_recorded_beginning_is_found(kept: int) -> None:
    record = Record()
    messages = [message for n in range(100) for message in (user(f"{n}"), assistant(f"answer {n}"))]
    for n in range(kept):
        last = await record.add(messages[: 2 * n + 1], messages[2 * n + 1], [n, 1], [2])
    match = await record.match([*messages, user("end")])
    assert match.turn is not None
    assert (match.turn.id, match.end) == (last.turn.id, 2 * kept - 1)


@pytest.mark.parametrize("size", [2, FOUND_AT_MOST + 1])
@pytest.mark.parametrize("reasoning", [True, False])
async def test_spelling_of_the_client_decides_between_equal_texts(size: int, reasoning: bool) -> None:
    record = Record()
    turns = []
    for n in range(size):
        message = assistant("42", reasoning=f"r{n}") if reasoning else assistant("42" + " " * n)
        turns.append((message, await record.add([user("Hi")], message, [5], [6, n])))
    for message, new in (turns[0], turns[-1], turns[size // 2]):
        match = await record.match([user("Hi"), message, _MORE])
        assert match.turn is not None, match.reason
        assert (match.turn.id, match.candidates) == (new.turn.id, size)


@pytest.mark.parametrize("equal", [1, 3 * FOUND_AT_MOST])
async def test_one_different_turn_among_equal_ones_is_ambiguous(equal: int) -> None:
    record = Record()
    await record.add([user("Hi")], assistant("a"), [5], [7])
    for _ in range(equal):
        await record.add([user("Hi")], assistant("a"), [5], [6])
    match = await record.match([user("Hi"), assistant("a"), _MORE])
    assert (match.turn, match.reason, match.candidates) == (None, Reason.AMBIGUOUS, equal + 1)


async def test_each_of_a_group_with_equal_ids_is_continued_once() -> None:
    record = Record()
    size = 3 * FOUND_AT_MOST
    turns = [await record.add([user("Hi")], assistant("a"), [5], [6]) for _ in range(size)]
    request = [user("Hi"), assistant("a"), _MORE]
    matches = await asyncio.gather(*(record.match(request) for _ in range(size)))
    assert all(match.claimed and match.same_rollout for match in matches)
    assert {match.turn.id for match in matches if match.turn} == {new.turn.id for new in turns}
    one_more = await record.match(request)
    assert one_more.turn is not None
    assert (one_more.same_rollout, one_more.candidates) == (False, size)


async def test_continued_turn_is_claimed_by_no_other_request() -> None:
    """A fork of the only turn stays in its rollout; one of two equal turns is still to be continued."""
    record = Record()
    first = await record.add([user("Hi")], assistant("a"), [5], [6])
    messages = [user("Hi"), assistant("a"), _MORE]
    await record.add(messages, assistant("b"), [5, 6, 7], [8], rollout=first.turn.rollout, parent=first)
    match = await record.match([*messages[:2], user("other")])
    assert match.turn is not None
    assert (match.turn.id, match.same_rollout, match.claimed) == (first.turn.id, True, False)
    second = await record.add([user("Hi")], assistant("a"), [5], [6])
    match = await record.match([*messages[:2], user("other")])
    assert match.turn is not None
    assert (match.turn.id, match.claimed) == (second.turn.id, True)


async def test_only_the_turns_that_are_not_cached_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    record, read = Record(), list[str]()
    turns = [await record.add([user("0")], assistant("a"), [0], [1])]
    for n in range(2, 82, 2):  # each appends one id and samples one
        ids, rollout = [*range(n + 1)], turns[0].turn.rollout
        turns.append(await record.add([user("0")], assistant("a"), ids, [n + 1], None, rollout, turns[-1]))
    path = record.store.path

    async def counted(turn: str, limit: int) -> list[Turn]:
        found = await path(turn, limit)
        read.extend(each.id for each in found)
        return found

    monkeypatch.setattr(record.store, "path", counted)
    async with record.matcher() as matcher:
        for end, expected in ((30, turns[:31]), (33, turns[26:34]), (40, turns[33:41]), (40, [])):
            found = await matcher.load(turns[end].turn.id)
            assert found is not None and json.loads(found.ids) == [*range(2 * end + 2)]
            assert sorted(read) == [each.turn.id for each in expected]
            read.clear()


async def test_longest_prefix_of_ids_in_a_wide_rollout() -> None:
    record = Record()
    first = await record.add([user("a")], assistant("a"), [5], [6], scope_of("s"))
    longer = await record.add([user("b")], assistant("b"), [5, 6, 7], [8], scope_of("s"))
    for n in range(FOUND_AT_MOST + 4):
        await record.add([user(f"{n}")], assistant("a"), [9, n], [9], scope_of("s"))
    request = chat_request(session=session_ref("s"))
    async with record.matcher() as matcher:
        for prompt, expected in (
            (b"[5,6,7,8,9]", longer),
            (b"[5,6,7,8]", longer),
            (b"[5,6,7]", first),
            (b"[5,6,7,80]", first),
            (b"[5,6,%d,7]" % 2**64, None),
            (b"[5,60]", None),
            (b"[%d]" % 2**64, None),
        ):
            turns = await matcher.longest_in_session(request, prompt)
            assert [turn.id for turn in turns] == ([expected.turn.id] if expected else [])


@pytest.mark.parametrize("sampled", [lambda n: [6, n], lambda n: [6]])
@pytest.mark.parametrize("size", [2, FOUND_AT_MOST + 3])
async def test_the_turn_that_the_client_names_decides_between_equal_texts(
    size: int, sampled: Callable[[int], list[int]]
) -> None:
    record = Record()
    turns = [await record.add([user("Hi")], assistant("a"), [5], sampled(n)) for n in range(size)]
    for new in (turns[0], turns[-1], turns[size // 2]):
        match = await record.match([user("Hi"), assistant("a"), _MORE], echoed={1: new.turn.id})
        assert match.turn is not None, match.reason
        assert (match.turn.id, match.reason, match.same_rollout) == (new.turn.id, None, True)
        assert match.turn.rollout == new.turn.rollout


@pytest.mark.parametrize(("text", "session"), [("b", None), ("a", "theirs")])
async def test_a_named_turn_that_is_another_is_not_continued(text: str, session: str | None) -> None:
    record = Record()
    other = await record.add([user("Hi")], assistant(text), [5], [7], scope_of(session))
    request = [user("Hi"), assistant("a"), _MORE]
    new = await record.add([user("Hi")], assistant("a"), [5], [6])
    match = await record.match(request, echoed={1: other.turn.id})
    assert match.turn is not None and match.turn.id == new.turn.id
    for n in range(FOUND_AT_MOST + 3):
        await record.add([user("Hi")], assistant("a"), [5], [6, n])
    match = await record.match(request, echoed={1: other.turn.id})
    assert (match.turn, match.reason) == (None, Reason.AMBIGUOUS)
