"""What the list shows of a rollout's turns, how many of them one request reads, and folds of rollouts."""

import json
from typing import Any

import pytest

from tests.support.store_utils import bare
from tests.support.trees import child, root
from tests.support.viewer.recordings import LIMITS
from tokenproxy.record.store import Session
from tokenproxy.record.turn import Turn, new_id
from tokenproxy.record.vocabulary import Reason
from tokenproxy.store.sqlite import SqliteStore
from tokenproxy.viewer import summary
from tokenproxy.viewer.folds import fold_table
from tokenproxy.viewer.summary import Summaries, Summary, mentions, summary_of

_ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"text": "What\n is it?"}]},
]


def _turn(name: str, **fields: Any) -> Turn:
    messages = {"messages": json.dumps(_ASKED).encode(), "message": b'{"content": "It is 4."}'}
    return root(name, [1, 2], [3], **{**messages, "reason": "first_turn", "source": "rendered", **fields})


@pytest.mark.parametrize(
    "message, last",
    [
        ({"role": "assistant", "content": "It\n is   4."}, "It is 4."),
        ({"content": "x" * 500}, "x" * 239 + "…"),
        (
            {"content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
            "f {}",
        ),
        ({"reasoning": "Let me see."}, "Let me see."),
        ({"content": {"text": [[["deep"]]]}, "tool_calls": 7}, "deep"),
        ([], ""),
    ],
)
def test_a_summary_is_one_line_of_each_end(message: object, last: str) -> None:
    first = _turn("a")
    turns = [first, child("b", first, [4], [5], message=json.dumps(message).encode())]
    assert summary_of(turns) == Summary("What is it?", last, 2, 0, None)
    assert summary_of([]) == Summary()


@pytest.mark.parametrize("reason", Reason)
def test_a_prompt_that_is_rendered_anew_drifted_if_it_continues_something(reason: Reason) -> None:
    """Nothing is known to compare with: whether a turn begins a conversation is read from its messages."""
    continues = json.dumps([*_ASKED, {"role": "assistant", "content": "4"}]).encode()
    assert summary_of([_turn("b", reason=reason)]).drifted == 0
    drifts = reason not in ("no_match", "no_ids")  # nothing was recorded that they could continue
    found = summary_of([_turn("b", reason=reason, messages=continues)])
    assert (found.drifted, found.drift) == ((1, "b") if drifts else (0, None))
    assert summary_of([_turn("b", reason=reason, messages=continues, source="given")]).drifted == 0


@pytest.mark.parametrize("prompt, drifts", [([1, 2, 9], True), ([1, 2, 3, 4], False)])
def test_a_prompt_that_holds_all_earlier_ids_is_exact_whatever_its_reason(
    prompt: list[int], drifts: bool
) -> None:
    continues = json.dumps([*_ASKED, {"role": "assistant"}]).encode()
    fields = {"reason": "no_match" if drifts else "history_edited", "source": "rendered"}
    again = root("b", prompt, [5], messages=continues, **fields)
    assert summary_of([_turn("a"), again]).drifted == int(drifts)


def test_messages_are_searched_without_the_names_of_their_parts() -> None:
    turns = [_turn("a", message=json.dumps({"role": "assistant", "content": "Größe \\n 4"}).encode())]
    assert mentions(turns, "größe") and mentions(turns, "be brief")
    assert not any(mentions(turns, words) for words in ("assistant", "content", "gro"))


async def test_a_request_reads_a_limited_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    store, read = SqliteStore(None, LIMITS), []
    turns = store.turns

    async def counted(rollout: str) -> list[Turn]:
        read.append(rollout)
        return await turns(rollout)

    monkeypatch.setattr(store, "turns", counted)
    for name in "abc":
        await store.add(Session(id=name, created=1.0), bare([_turn(new_id(), rollout=name)]))
    sessions = await store.sessions(limit=9)
    monkeypatch.setattr(summary, "READ_BYTES", sum(session.size for session in sessions[:2]))
    kept = Summaries()
    found, reading = await kept.read(store, sessions)
    assert (set(found), reading, read) == ({"c", "b"}, True, ["c", "b"])
    found, reading = await kept.read(store, sessions)
    assert (set(found), reading, read) == ({"a", "b", "c"}, False, ["c", "b", "a"])
    await store.add(Session(id="b", created=1.0), bare([_turn(new_id(), rollout="b")]))
    found, _ = await kept.read(store, await store.sessions(limit=9))
    assert found["b"].turns == 2 and read == ["c", "b", "a", "b"]


async def test_a_rollout_of_more_bytes_than_a_request_reads_keeps_none_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = SqliteStore(None, LIMITS)
    for name, turns in (("small", 1), ("large", 9)):
        added = [_turn(new_id(), rollout=name) for _ in range(turns)]
        await store.add(Session(id=name, created=1.0), bare(added))
    sessions = await store.sessions(limit=9)
    monkeypatch.setattr(summary, "READ_BYTES", sessions[1].size)
    found, reading = await Summaries().read(store, sessions)
    assert (set(found), reading) == ({"small"}, False)


def _session(name: str, reward: float | None, **metadata: object) -> Session:
    rewards = {} if reward is None else {"": reward}
    return Session(id=name, created=1.0, metadata=json.dumps(metadata).encode(), rewards=rewards)


def test_a_fold_has_mean_spread_and_count_of_its_rewards_zeros_included() -> None:
    sessions = [_session("a", 0.0, step=1), _session("b", 1.0, step="1"), _session("c", None, step=1)]
    [fold] = fold_table(sessions, {}, "step")["data"]
    assert (fold.value, fold.rollouts, fold.rewarded, fold.mean, fold.spread) == ("1", 3, 2, 0.5, 0.5)


def test_folds_tell_what_they_cover() -> None:
    read = Summary("", "", turns=4, drifted=1, drift="t")
    sessions = [_session("a", None, step=1), _session("b", None, step=1), _session("c", 2.0)]
    table = fold_table(sessions, {"a": read, "c": read}, "step")
    with_step, without = table["data"]
    assert (with_step.rollouts, with_step.read, with_step.turns, with_step.drifted) == (2, 1, 4, 1)
    assert (with_step.mean, with_step.spread, without.value, without.spread) == (None, None, None, 0.0)
    assert (table["rollouts"], table["folds"], table["keys"]) == (3, 2, ["step"])


def test_folds_are_limited_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenproxy.viewer.folds._MOST_FOLDS", 2)
    table = fold_table([_session(name, 1.0, group=name) for name in "abcde"], {}, "group")
    assert ([fold.value for fold in table["data"]], table["folds"]) == (["a", "b"], 5)
