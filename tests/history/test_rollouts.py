"""What is begun is finished: recording outlives the request it belongs to."""

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from proxy.history.conversation import Asked, Digester, Setting
from proxy.history.evidence import Outcome, Sampled
from proxy.history.plan import Plan
from proxy.history.rollouts import Rollouts
from proxy.history.store import Limits, StoreError
from proxy.metrics import Metrics
from proxy.stores.memory import MemoryStore


@pytest.fixture
async def rollouts() -> AsyncIterator[Rollouts]:
    with ThreadPoolExecutor(1) as executor:
        made = Rollouts(MemoryStore(Limits()), executor, Metrics())
        await made.open()
        yield made
        await made.aclose()


def _plan() -> Plan:
    asked = Asked(json.dumps([{"role": "user", "content": "Hi"}]).encode(), Setting(), "m", "s")
    return Plan(asked, Digester().read(asked, "m"), "m", "s")


def _outcome() -> Outcome:
    message = {"role": "assistant", "content": "x"}
    return Outcome(b"[1]", [Sampled(0, message, [3], [0.0], "stop")], 1)


async def test_what_is_recorded_surely_survives_its_request(rollouts: Rollouts) -> None:
    begun, go_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await go_on.wait()
        await rollouts.record(_plan(), _outcome())
        done.set()

    request = asyncio.create_task(rollouts.surely(work()))
    await begun.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    go_on.set()
    await asyncio.wait_for(done.wait(), 5)
    assert len(await rollouts.store.turns("s")) == 1


async def test_closing_waits_for_what_is_being_recorded(rollouts: Rollouts) -> None:
    rollouts.record_later(_plan(), _outcome())
    await rollouts.aclose()
    assert len(await rollouts.store.turns("s")) == 1


async def test_errors_of_recording_reach_whoever_waits(rollouts: Rollouts) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await rollouts.surely(fail())


async def test_a_store_that_fails_is_counted(rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*args: object) -> None:
        raise StoreError("out of order")

    monkeypatch.setattr(rollouts.store, "add", fail)
    assert await rollouts.record(_plan(), _outcome()) == []
    assert rollouts.metrics.registry.get_sample_value("tokenproxy_store_errors_total") == 1
    assert rollouts.metrics.registry.get_sample_value("tokenproxy_turns_total") is None


async def test_what_was_recorded_is_counted(rollouts: Rollouts) -> None:
    (turn,) = await rollouts.record(_plan(), _outcome())
    labels = {"finish_reason": "stop", "problem": "none"}
    assert rollouts.metrics.registry.get_sample_value("tokenproxy_turns_total", labels) == 1
    assert [one.id for one in await rollouts.store.turns("s")] == [turn]


async def test_recording_twice_changes_nothing(rollouts: Rollouts) -> None:
    plan = _plan()
    for _ in range(2):
        await rollouts.record(plan, _outcome())
    assert len(await rollouts.store.turns("s")) == 1


async def test_ids_that_are_none_cost_no_client_its_answer(
    rollouts: Rollouts, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = _outcome()
    outcome.choices[0].ids = [2**40]
    assert await rollouts.record(_plan(), outcome) == []
    assert rollouts.metrics.registry.get_sample_value("tokenproxy_store_errors_total") == 1
    assert "could not be recorded" in caplog.text
