"""What a request claimed is released if its plan fails or its client leaves."""

import asyncio
from typing import Any

import pytest

from chat_tokenizer import ids
from tests.support.recording import assistant, chat_request, rendered_plan, user
from tests.support.utils import until
from tokenproxy.base.request import ChatRequest, EngineRoute, GivenIds
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.claims import Claims, Tasks
from tokenproxy.record.completion import Completion, SampledChoice
from tokenproxy.record.history import History
from tokenproxy.record.plan import PromptPlan, ServedModel, place
from tokenproxy.record.recorder import Recording
from tokenproxy.record.store import StoreError

_MODEL = ServedModel("m", None, max_model_len=100)


def _request(count: int, prompt: list[int]) -> ChatRequest:
    given = tuple(GivenIds("prompt", ids.dump(prompt), len(prompt)) for _ in range(count))
    return chat_request(prompts=given, engine_route=EngineRoute.COMPLETIONS, findable=False)


def _claimed(plan: PromptPlan) -> str | None:
    match = plan.match
    return match.turn.id if match.turn is not None and match.claimed else None


async def test_what_was_claimed_is_released_if_another_prompt_fails(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Claims(history.pins) as claims:
        for _ in range(2):  # two rollouts with equal ids
            plan = await history.planner.plan(_request(1, [5, 6]), _MODEL, claims)
            choice = SampledChoice(0, assistant("x"), [7], [-0.5], "stop", prompt_ids=b"[5,6]")
            await Recording(history, plan, claims).add(Completion(None, [choice], 1))
    placed = 0

    def fail_at_last(*args: Any) -> PromptPlan:
        nonlocal placed
        placed += 1
        if placed == 3:
            raise asyncio.CancelledError
        return place(*args)

    monkeypatch.setattr("tokenproxy.record.planner.place", fail_at_last)
    with pytest.raises(asyncio.CancelledError):
        async with Claims(history.pins) as claims:
            await history.planner.plan(_request(3, [5, 6, 7, 8]), _MODEL, claims)
    monkeypatch.undo()
    async with Claims(history.pins) as claims:
        plan = await history.planner.plan(_request(2, [5, 6, 7, 8]), _MODEL, claims)
    assert len({_claimed(prompt) for prompt in plan.prompts} - {None}) == 2


async def test_a_claim_is_kept_only_if_a_turn_was_recorded(history: History) -> None:
    choice = SampledChoice(0, assistant("a"), [6], [-0.5], "stop")
    async with Claims(history.pins) as claims:
        for _ in range(2):  # two rollouts with equal ids
            first = Recording(history, rendered_plan([user("Hi")]), claims)
            await first.add(Completion(b"[5]", [choice], 1))
    request = chat_request([user("Hi"), assistant("a"), user("more")])
    for _ in range(2):  # a request that records nothing leaves both to others
        claimed = set()
        async with Claims(history.pins) as claims, Claims(history.pins) as others:
            for each in (claims, others):
                plan = await history.planner.plan(request, _MODEL, each)
                claimed.add(_claimed(plan))
        assert len(claimed - {None}) == 2
    async with Claims(history.pins) as claims:
        plan = await history.planner.plan(request, _MODEL, claims)
        await Recording(history, plan, claims).add(Completion(b"[5]", [choice], 1))
    async with Claims(history.pins) as claims:
        then = [await history.planner.plan(request, _MODEL, claims) for _ in range(2)]
    assert {_claimed(each) for each in then} == {None, *claimed} - {_claimed(plan)}


async def test_a_deleted_rollout_is_not_recorded_and_the_others_are(history: History) -> None:
    async with Claims(history.pins) as claims:
        plan = await history.planner.plan(_request(2, [5]), _MODEL, claims)
    recording = Recording(history, plan, claims)
    gone, kept = (prompt.session.id for prompt in plan.prompts)
    history.forget(gone)
    choices = [SampledChoice(at, {}, [1], [0.0], "stop", prompt_ids=b"[5]") for at in (0, 1)]
    await recording.add(Completion(None, choices, 2))
    assert (await history.store.turns(gone), len(await history.store.turns(kept))) == ([], 1)


async def test_what_runs_forever_survives_every_error_and_logs_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = [StoreError("away"), *(ValueError("odd") for _ in range(3)), None, ValueError("odd")]
    steps = 0

    async def step() -> None:
        nonlocal steps
        steps += 1
        await asyncio.sleep(0)
        if steps <= len(errors) and (error := errors[steps - 1]) is not None:
            raise error

    tasks = Tasks(Metrics(), 0.0)
    tasks.run_forever(step, "nothing is done")
    await until(lambda: steps > len(errors) + 1)
    await tasks.aclose()
    assert [record.getMessage() for record in caplog.records] == [
        "nothing is done: away",
        "nothing is done",
        "nothing is done",
    ]
    assert caplog.text.count("ValueError: odd") == 2
