"""The recorded sessions: their ids keep the law, agree with their messages, and are the same in each run."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from proxy.history.store import Store
from proxy.history.turn import Turn, unpack_ids, unpack_logprobs
from proxy.samples.tree import TurnTree, path_of
from tests.support.fake_wire import as_rendered, tools_as_rendered
from tests.support.store_utils import opened
from tests.support.tiny_model import SPECIAL_TOKENS, TinyModel
from tests.support.viewer.model import EMOJI, make_viewer_model
from tests.support.viewer.proxies import RecordedProxy
from tests.support.viewer.recorder import (
    Recorded,
    SessionRecorder,
    answer,
    cut_answer,
    ids_of,
    tool_call,
    user,
)
from tests.support.viewer.recordings import (
    DEEP,
    DEEP_TURNS,
    EMPTY,
    HOSTILE,
    HOSTILE_TEXTS,
    LIMITS,
    LONG,
    LONG_IDS,
    LONG_TURNS,
    few_sessions,
    hostile_session,
    many_sessions,
    write,
)
from tests.support.viewer.small_session import SMALL, SmallSession, small_session


@pytest.fixture(scope="module")
def few(viewer_model: TinyModel) -> dict[str, Recorded]:
    return {recorded.session.id: recorded for recorded in few_sessions(viewer_model)}


@pytest.fixture(scope="module")
def small(viewer_model: TinyModel) -> SmallSession:
    return small_session(viewer_model)


def _by_id(turns: Sequence[Turn]) -> dict[str, Turn]:
    return {turn.id: turn for turn in turns}


def _prompt(turn: Turn, turns: dict[str, Turn]) -> list[int]:
    return ids_of(turn, turns)[: turn.prompt_tokens]


def _messages(path: Sequence[Turn]) -> list[dict[str, Any]]:
    """The messages of the prompt of a path's last turn."""
    parts = [(msgspec.json.decode(turn.messages), [msgspec.json.decode(turn.message)]) for turn in path]
    return [message for part in parts for messages in part for message in messages][:-1]


def _rendered(model: TinyModel, path: Sequence[Turn]) -> list[int]:
    """The prompt of a path's last turn as a server without a record renders it."""
    tools = tools_as_rendered(msgspec.json.decode(path[0].tools)) if path[0].tools else None
    return model.render(as_rendered(_messages(path)), tools=tools)


@pytest.mark.parametrize("name", [SMALL, HOSTILE, LONG, DEEP])
def test_turns_keep_the_law_and_have_all_their_evidence(few: dict[str, Recorded], name: str) -> None:
    turns = _by_id(few[name].turns)
    for turn in turns.values():
        ids = ids_of(turn, turns)
        assert len(ids) == turn.prompt_tokens + turn.completion_tokens
        assert len(unpack_logprobs(turn.logprobs)) == turn.completion_tokens
        assert turn.weight_versions[-1].end == turn.completion_tokens
        if turn.parent is not None:
            parent = ids_of(turns[turn.parent], turns)
            assert ids == parent + unpack_ids(turn.appended) + unpack_ids(turn.completion)
    assert all(before.id < after.id for before, after in pairwise(few[LONG].turns))


@pytest.mark.parametrize("name", [SMALL, HOSTILE, LONG, DEEP])
def test_only_the_refused_turns_are_refused(few: dict[str, Recorded], small: SmallSession, name: str) -> None:
    tree = TurnTree(few[name].turns)
    refused = {fault.turn for _, fault in tree.faulty_leaves()}
    assert refused == ({small.refused.id} if name == SMALL else set())


def test_prompts_are_what_the_chat_template_renders(
    viewer_model: TinyModel, few: dict[str, Recorded]
) -> None:
    turns = _by_id(few[DEEP].turns)
    for turn in few[DEEP].turns[::40]:
        assert _rendered(viewer_model, path_of(turn, turns)) == _prompt(turn, turns)


def test_template_renders_other_ids_where_the_recording_drifts(
    viewer_model: TinyModel, small: SmallSession
) -> None:
    turns = _by_id(small.recorded.turns)

    def drifts(turn: Turn) -> bool:
        return _rendered(viewer_model, path_of(turn, turns)) != _prompt(turn, turns)

    # a prompt without an answer of the model is the template's own
    assert not any(map(drifts, (small.first, small.subagent, small.broken)))
    # the template strips thinking
    assert drifts(small.fork)
    # other ids of the same text
    spelled, text = unpack_ids(small.other_choice.completion), "The function is wrong."
    assert viewer_model.decode(spelled) == text
    assert len(spelled) > 2 * len(viewer_model.encode(text))


def test_session_has_every_kind_of_turn(small: SmallSession) -> None:
    assert small.fork.request == small.other_choice.request
    assert (small.fork.choice, small.other_choice.choice) == (0, 1)
    assert small.other_choice.prompt_turn == small.fork.id
    assert small.fork.parent == small.other_choice.parent == small.first.id
    assert (small.aborted.finish_reason, small.subagent_end.finish_reason) == ("abort", "length")
    assert {small.subagent.agent, small.subagent_end.agent} == {"agent-1"}
    assert [span.version for span in small.emoji.weight_versions] == ["1", "2"]
    assert small.recorded.rewards == {"": 0.75, small.emoji.id: 1.0, small.aborted.id: -0.5}
    special = set(range(len(SPECIAL_TOKENS)))
    assert special & set(unpack_ids(small.special.completion)[:-1])
    assert len(special & set(unpack_ids(small.special.appended))) == 3


def test_emoji_are_halves_of_characters(viewer_model: TinyModel, small: SmallSession) -> None:
    for emoji in EMOJI:
        first, second = viewer_model.encode(emoji)
        assert "\ufffd" in viewer_model.decode([first])
        assert "\ufffd" in viewer_model.decode([second])
    # its other half was not sampled
    assert viewer_model.decode(unpack_ids(small.aborted.completion)).endswith("\ufffd")
    faces = f"Done {EMOJI[0]} and {EMOJI[5]}{EMOJI[7]}!"
    assert viewer_model.decode(unpack_ids(small.emoji.completion)) == faces


def test_broken_prompt_begins_like_the_turn_that_it_breaks_with(small: SmallSession) -> None:
    turns = _by_id(small.recorded.turns)
    earlier, broken = ids_of(small.emoji, turns), ids_of(small.broken, turns)
    equal = next(at for at, (a, b) in enumerate(zip(earlier, broken, strict=False)) if a != b)
    assert small.broken.parent is None
    assert small.broken.reason == "history_edited"
    assert small.first.prompt_tokens < equal + 2 < len(earlier)


def test_hostile_texts_are_everywhere(few: dict[str, Recorded]) -> None:
    hostile = few[HOSTILE]
    for text, turn in zip(HOSTILE_TEXTS, hostile.turns, strict=True):
        message = msgspec.json.decode(turn.message)
        [call] = message["tool_calls"]
        assert (message["content"], message["reasoning"]) == (text, text)
        assert msgspec.json.decode(call["function"]["arguments"])["path"] == text
        assert msgspec.json.decode(turn.messages)[-1]["content"] == text
        assert "<" in turn.model + turn.agent and "<" in turn.request_class
    assert set(HOSTILE_TEXTS) < msgspec.json.decode(hostile.session.metadata).keys()


def test_long_session_has_exactly_its_ids(few: dict[str, Recorded]) -> None:
    turns = few[LONG].turns
    assert len(turns) == LONG_TURNS
    assert len(path_of(turns[-1], _by_id(turns))) == LONG_TURNS
    assert turns[-1].prompt_tokens + turns[-1].completion_tokens == LONG_IDS


def test_deep_session_has_its_turns_forks_and_subagents(few: dict[str, Recorded]) -> None:
    turns = few[DEEP].turns
    children = Counter(turn.parent for turn in turns if turn.parent)
    assert len(_by_id(turns)) == DEEP_TURNS
    assert sum(count > 1 for count in children.values()) > 20
    assert len({turn.agent for turn in turns}) > 20


def test_appended_ids_close_a_cut_turn(viewer_model: TinyModel) -> None:
    record = SessionRecorder(viewer_model, "r")
    ended = record.turn([user("Hi")], answer(viewer_model, "", calls=[tool_call("f", text="ü")]))
    cut = record.turn([user("Hi")], cut_answer(viewer_model, viewer_model.encode("Yes")))
    after_end, after_cut = (
        viewer_model.reference.decode(
            unpack_ids(record.turn([user("More")], answer(viewer_model, "No"), parent=parent).appended)
        )
        for parent in (ended, cut)
    )
    assert after_end == "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    assert after_cut == "<|im_end|>" + after_end


def test_recordings_are_the_same_each_time(
    viewer_model: TinyModel, tmp_path: Path, few: dict[str, Recorded]
) -> None:
    model = make_viewer_model(tmp_path)
    files = (tmp_path / "tokenizer.json", viewer_model.folder / "tokenizer.json")
    assert files[0].read_bytes() == files[1].read_bytes()
    assert small_session(model).recorded == few[SMALL]
    assert hostile_session(model) == few[HOSTILE]
    assert list(many_sessions(model, 300)) == list(many_sessions(viewer_model, 300))


def test_many_sessions_are_sound_and_of_many_kinds(viewer_model: TinyModel) -> None:
    recorded = list(many_sessions(viewer_model, 3000))
    turns = [turn for each in recorded for turn in each.turns]
    assert len(_by_id(turns)) == len(turns)
    kinds = [Counter(getattr(turn, name) for turn in turns) for name in ("model", "reason", "problem")]
    assert [len(kind) for kind in kinds] == [2, 5, 2]
    assert {turn.finish_reason for turn in turns} == {"stop", "length", "abort"}
    for each in recorded[:50]:
        own = _by_id(each.turns)
        for turn in each.turns:
            assert len(ids_of(turn, own)) == turn.prompt_tokens + turn.completion_tokens


async def test_sessions_are_written_with_their_own_times(viewer_model: TinyModel, tmp_path: Path) -> None:
    recorded = list(many_sessions(viewer_model, 2500))
    async with opened(f"sqlite://{tmp_path / 'rollouts.db'}", LIMITS) as store:
        await write(store, recorded)
        sessions = await store.sessions(limit=len(recorded) + 1)
        by_use = sorted(recorded, key=lambda each: each.session.used, reverse=True)
        assert [each.id for each in sessions] == [each.session.id for each in by_use]
        assert [each.used for each in sessions] == [each.session.used for each in by_use]
        newest = by_use[0]
        assert await store.turns(newest.session.id) == sorted(newest.turns, key=lambda turn: turn.id)
        assert await store.rewards(newest.session.id) == newest.rewards


async def test_running_proxy_has_the_recorded_sessions(
    recorded: RecordedProxy, recorded_store: Store, viewer_model: TinyModel
) -> None:
    async with httpx.AsyncClient(base_url=recorded.url, trust_env=False) as client:
        listed = (await client.get("/v1/sessions")).json()["data"]
        assert {SMALL, HOSTILE, EMPTY, LONG, DEEP} <= {session["id"] for session in listed}
        assert (await client.get(f"/v1/sessions/{DEEP}")).json()["turn_count"] == DEEP_TURNS
        # what is recorded while it runs is there at once
        added = SessionRecorder(viewer_model, "added")
        added.turn([user("Hi")], answer(viewer_model, "Hello"))
        await write(recorded_store, [added.recorded()])
        assert (await client.get("/v1/sessions/added")).json()["turn_count"] == 1
        await recorded_store.delete("added")


async def test_running_proxy_records_turns_of_the_engine(recorded: RecordedProxy) -> None:
    messages = [user("Hi")]
    headers = {"x-session-id": "live"}
    async with httpx.AsyncClient(base_url=recorded.url, trust_env=False, headers=headers) as client:
        for source in ("rendered", "extended"):
            sent = {"model": "tiny", "messages": messages}
            response = await client.post("/v1/chat/completions", json=sent)
            assert response.headers["x-prompt-source"] == source, response.text
            messages += [response.json()["choices"][0]["message"], user("More")]
        assert (await client.delete("/v1/sessions/live")).is_success
