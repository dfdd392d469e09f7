"""What a request claimed is released if its plan fails or its client leaves."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.history.completion import Completion, SampledChoice
from proxy.history.history import History
from proxy.history.matcher import Match
from proxy.history.plan import Placement, PromptPlan, ServedModel
from proxy.turn.request import ChatRequest, EngineRoute, GivenIds
from tests.support.recording import assistant, chat_request, rendered_plan, user
from tokenization import ids

_MODEL = ServedModel("m", None, max_model_len=100)


def _request(count: int, prompt: list[int]) -> ChatRequest:
    given = tuple(GivenIds("prompt", ids.dump(prompt), len(prompt)) for _ in range(count))
    return chat_request(prompts=given, engine_route=EngineRoute.COMPLETIONS, findable=False)


async def test_what_was_claimed_is_released_if_another_prompt_fails(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):  # two rollouts with equal ids
        plan = await history.planner.plan(_request(1, [5, 6]), _MODEL)
        choice = SampledChoice(0, assistant("x"), [7], [-0.5], "stop", prompt_ids=b"[5,6]")
        await history.recorder.start(plan).add(Completion(None, [choice], 1))
    place, placed = history.placer.place, 0

    def fail_at_last(*args: Any) -> Placement:
        nonlocal placed
        placed += 1
        if placed == 3:
            raise asyncio.CancelledError
        return place(*args)

    monkeypatch.setattr(type(history.placer), "place", lambda self, *args: fail_at_last(*args))
    with pytest.raises(asyncio.CancelledError):
        await history.planner.plan(_request(3, [5, 6, 7, 8]), _MODEL)
    monkeypatch.undo()
    plan = await history.planner.plan(_request(2, [5, 6, 7, 8]), _MODEL)
    assert len({prompt.placement.claimed for prompt in plan.prompts} - {None}) == 2


async def test_what_was_claimed_is_released_if_the_plan_of_a_chat_fails(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = SampledChoice(0, assistant("a"), [6], [-0.5], "stop")
    for _ in range(2):  # two rollouts with equal ids
        await history.recorder.start(rendered_plan([user("Hi")])).add(Completion(b"[5]", [choice], 1))
    request = chat_request([user("Hi"), assistant("a"), user("more")])

    async def fail(*args: Any) -> PromptPlan:
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(type(history.planner), "_plan_chat", fail)
        with pytest.raises(asyncio.CancelledError):
            await history.planner.plan(request, _MODEL)
    plans = [await history.planner.plan(request, _MODEL) for _ in range(2)]
    assert len({plan.placement.claimed for plan in plans} - {None}) == 2


async def test_what_was_claimed_is_released_if_the_client_leaves_while_it_is_pinned(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed: Any = SimpleNamespace(id="t", rollout="r")
    released, pinning = [], asyncio.Event()

    async def find(*args: Any) -> Match:
        return Match(claimed, claimed=True)

    async def pin(*args: Any) -> None:
        pinning.set()
        await asyncio.Event().wait()

    async def release(turn: str) -> None:
        released.append(turn)

    monkeypatch.setattr("proxy.history.placing._rollouts_of", lambda request: (None, None))
    monkeypatch.setattr(type(history.placer), "_match", find)
    monkeypatch.setattr(history.placer.pins, "pin", pin)
    monkeypatch.setattr(history.store, "release", release)
    unused: Any = None
    task = asyncio.create_task(history.placer.match(unused, unused, unused))
    await pinning.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert released == ["t"]


async def test_a_deleted_rollout_is_not_recorded_and_the_others_are(history: History) -> None:
    plan = await history.planner.plan(_request(2, [5]), _MODEL)
    recording = history.recorder.start(plan)
    gone, kept = (prompt.placement.session.id for prompt in plan.prompts)
    history.recorder.forget(gone)
    choices = [SampledChoice(at, {}, [1], [0.0], "stop", prompt_ids=b"[5]") for at in (0, 1)]
    await recording.add(Completion(None, choices, 2))
    assert (await history.store.turns(gone), len(await history.store.turns(kept))) == ([], 1)
