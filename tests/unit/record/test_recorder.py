"""From a plan and a completion to turns, and into the store whatever happens meanwhile."""

import asyncio
import json
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.recording import assistant, rendered_plan, scope_of, user
from tests.support.trees import root
from tokenproxy.base.request import Rendering
from tokenproxy.record.cache import cached_turn, hash_ids
from tokenproxy.record.claims import Claims
from tokenproxy.record.completion import Completion, SampledChoice
from tokenproxy.record.history import History
from tokenproxy.record.plan import PromptPlan
from tokenproxy.record.recorder import Recording, new_turns
from tokenproxy.record.store import StoreError
from tokenproxy.record.turn import turn_id, unpack_ids, unpack_logprobs
from tokenproxy.record.vocabulary import Source

_MESSAGES = [user("Hi"), assistant("from 1", reasoning="so"), user("more")]
_TOOLS = b'[{"type":"function","function":{"name":"f"}}]'


def _plan(tools: bytes = _TOOLS) -> PromptPlan:
    return rendered_plan(_MESSAGES, scope_of("s", tools=tools), rendering=Rendering(tools=tools))


def _extending(tools: bytes = _TOOLS) -> PromptPlan:
    """A plan that continues ids 5, 6, 7, sampled with tools."""
    turn = root("1", [5, 6], [7], scope=scope_of("s", tools=_TOOLS).parts)
    parent = cached_turn([turn], None, b"[5,6,7]", hash_ids(None, turn.appended, turn.completion))
    extended = {"source": Source.EXTENDED, "prompt": b"[5,6,7,8]"}
    return replace(_plan(tools), parent=parent, first_new=2, **extended)


def _sampled(index: int = 0, **fields: Any) -> SampledChoice:
    given = {"ids": [9, 2], "logprobs": [-0.5, -0.25], "finish_reason": "stop"}
    return SampledChoice(index, assistant("x"), **{**given, **fields})


def test_extension_is_recorded_as_its_appended_ids() -> None:
    (new,) = new_turns(_extending(), Completion(b"[5, 6, 7, 8]", [_sampled()], 2), None)
    turn = new.turn
    assert (turn.parent, turn.prompt_tokens, turn.problem) == ("1", 4, "")
    assert (unpack_ids(turn.appended), unpack_ids(turn.completion)) == ([8], [9, 2])
    assert unpack_logprobs(turn.logprobs) == [-0.5, -0.25]
    assert json.loads(turn.messages) == _MESSAGES[2:]
    assert (turn.tools, turn.template_kwargs, len(turn.reasonings)) == (None, None, 1)
    assert new.cached is not None and json.loads(new.cached.ids) == [5, 6, 7, 8, 9, 2]


@pytest.mark.parametrize("tools", [b"", b"[{}]"])
def test_tools_that_differ_from_the_parent_are_recorded(tools: bytes) -> None:
    (new,) = new_turns(_extending(tools), Completion(b"[5,6,7,8]", [_sampled()], 2), None)
    assert (new.turn.parent, new.turn.tools) == ("1", tools)


@pytest.mark.parametrize("prompt", [b"[5,6,7]", b"[1,5,6,7,8]", b"[5,6,7,9]"])
def test_prompt_that_the_engine_used_counts_if_it_is_not_the_one_sent(prompt: bytes) -> None:
    (new,) = new_turns(_extending(), Completion(prompt, [_sampled()], 2), None)
    turn = new.turn
    assert (turn.parent, turn.problem, turn.tools) == (None, "prompt_mismatch", _TOOLS)
    assert unpack_ids(turn.appended) == json.loads(prompt)
    assert turn.prompt_tokens == len(json.loads(prompt))
    assert json.loads(turn.messages) == _MESSAGES
    assert len(turn.reasonings) == 2


def test_each_choice_is_a_turn_and_one_holds_the_prompt() -> None:
    choices = [_sampled(0), _sampled(1, ids=[4], logprobs=[0.0]), _sampled(2)]
    plan = _plan()
    turns = [new.turn for new in new_turns(plan, Completion(b"[1]", choices, 5), None)]
    assert [turn.choice for turn in turns] == [0, 1, 2]
    assert [turn.id for turn in turns] == [turn_id(plan.turn_id, n) for n in range(3)]
    assert {turn.request for turn in turns} == {plan.turn_id}
    assert [turn.prompt_turn for turn in turns] == [None, turns[0].id, turns[0].id]
    assert [bool(turn.appended) for turn in turns] == [True, False, False]
    assert [turn.prompt_tokens for turn in turns] == [1, 1, 1]


@pytest.mark.parametrize(
    "fields, made",
    [
        ({"ids": [], "finish_reason": "abort"}, 0),
        ({"ids": [], "finish_reason": None}, 0),
        ({"ids": [], "finish_reason": "stop"}, 1),
        ({"ids": [3], "finish_reason": "abort"}, 1),
    ],
)
def test_choice_without_sampled_ids_gives_no_turn(fields: dict[str, Any], made: int) -> None:
    completion = Completion(b"[1]", [_sampled(0, **fields), _sampled(1)])
    assert len(new_turns(_plan(), completion, None)) == made + 1


def _completion() -> Completion:
    return Completion(b"[1]", [SampledChoice(0, assistant("x"), [3], [0.0], "stop")], 1)


async def test_recording_survives_the_cancellation_of_its_request(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()
    add = history.store.add

    async def slow(*args: Any) -> Any:
        started.set()
        await go_on.wait()
        return await add(*args)

    monkeypatch.setattr(history.store, "add", slow)
    request = asyncio.create_task(Recording(history, _plan(), Claims(history.pins)).add(_completion()))
    await started.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    go_on.set()
    await history.tasks.aclose()
    (turn,) = await history.store.turns("s")
    assert history.cache.turn(turn.id) is not None
    labels = {"finish_reason": "stop", "problem": "none"}
    assert history.metrics.registry.get_sample_value("tokenproxy_turns_total", labels) == 1


@pytest.mark.parametrize("error", [StoreError("out of order"), ZeroDivisionError()])
async def test_error_of_recording_is_counted_and_fails_no_response(
    history: History, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    async def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(history.store, "add", fail)
    recording = Recording(history, _plan(), Claims(history.pins))
    await recording.add(_completion())
    assert "recorded" in caplog.text
    assert history.metrics.registry.get_sample_value("tokenproxy_store_errors_total") == 1
    assert history.metrics.registry.get_sample_value("tokenproxy_turns_total") is None
