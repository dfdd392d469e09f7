"""Which failed requests run once more, on which replica, and what counts against a replica."""

import asyncio

import pytest

from tests.contract.fleet.memory_engine import (
    Answer,
    MemoryEngine,
    answers,
    ask,
    broken,
    engines,
    fails,
    fleet_of,
    gone,
    replica_of,
    streams,
    waits,
)
from tests.support.stepped import block, elapse, settled, stepped
from tokenproxy.base.errors import ApiError, EngineBroken, EngineTimeout, EngineUnavailable, Overloaded
from tokenproxy.fleet.choosing import sticky_least_loaded
from tokenproxy.fleet.load import BreakerState


def _error_stream(code: str) -> Answer:
    event = f'data: {{"error": {{"message": "no", "type": "x", "code": {code}}}}}\n\n'
    return streams(events=[event.encode(), b"data: [DONE]\n\n"])


def _started(*all_engines: MemoryEngine) -> list[int]:
    return [engine.started for engine in all_engines]


@pytest.mark.parametrize(
    "bad",
    [
        *(answers(status) for status in (500, 502, 503, 504)),
        answers(200, b"<html>", b"text/html"),
        streams(events=[]),
        *(_error_stream(code) for code in ("503", '"internal"', "null", "7")),
        fails(broken()),
        fails(EngineTimeout("too slow", received=True)),
        fails(EngineTimeout("no connection")),
    ],
)
@stepped
async def test_a_failure_before_the_first_byte_runs_on_the_next_replica(bad: Answer) -> None:
    first, second, third = all_engines = engines(3)
    async with fleet_of(*all_engines) as fleet:
        first.replies = [bad]
        second.usual = streams()
        status, body = await ask(fleet)
        assert (status, body[-14:]) == (200, b"data: [DONE]\n\n")
        assert _started(first, second, third) == [1, 1, 0]
        assert [replica.load.requests for replica in fleet.replicas] == [0, 0, 0]


@pytest.mark.parametrize(
    "refusal, status",
    [*((answers(status), status) for status in (400, 429, 501)), (_error_stream("400"), 400)],
)
@stepped
async def test_a_refusal_is_the_answer(refusal: Answer, status: int) -> None:
    first, second = all_engines = engines(2)
    async with fleet_of(*all_engines) as fleet:
        for _ in range(4):
            first.replies = [refusal]
            assert (await ask(fleet))[0] == status
        assert _started(first, second) == [4, 0]


@stepped
async def test_a_request_runs_once_more_at_most_and_a_second_server_error_blames_nobody() -> None:
    all_engines = engines(3)
    async with fleet_of(*all_engines) as fleet:
        for engine in all_engines:
            engine.usual = answers(500, b"no")
        for _ in range(4):
            assert await ask(fleet) == (500, b"no")
        assert _started(*all_engines) == [4, 4, 0]
        for engine in all_engines:
            engine.usual = fails(broken())
        with pytest.raises(EngineBroken):
            await ask(fleet)
        assert _started(*all_engines) == [5, 5, 0]


@stepped
async def test_a_request_that_may_not_repeat_runs_once_unless_it_was_not_received() -> None:
    first, second = all_engines = engines(2)
    async with fleet_of(*all_engines) as fleet:
        for answer in (fails(broken()), fails(EngineTimeout("slow", received=True))):
            first.replies = [answer]
            with pytest.raises(ApiError):
                await ask(fleet, repeatable=False)
        assert _started(first, second) == [2, 0]
        gone(first)
        assert (await ask(fleet, repeatable=False))[0] == 200


@stepped
async def test_dead_engines_cost_nothing_and_without_any_all_requests_get_503() -> None:
    all_engines = engines(3)
    async with fleet_of(*all_engines, interval_s=600.0) as fleet:
        gone(all_engines[0])
        gone(all_engines[1])
        assert (await ask(fleet))[0] == 200
        assert [replica.ready for replica in fleet.replicas] == [False, False, True]
        gone(all_engines[2])
        results = await asyncio.gather(*(ask(fleet) for _ in range(24)), return_exceptions=True)
        assert {type(result) for result in results} == {EngineUnavailable}
        assert all(engine.name in str(results[0]) for engine in all_engines)


# --- requests under which an engine dies


@stepped
async def test_a_request_that_ran_alone_on_an_engine_that_died_is_refused_for_a_minute() -> None:
    """vLLM's API server outlives its engine core: it answers 500, and 503 on /health."""
    first, second = all_engines = engines(2)
    async with fleet_of(*all_engines, interval_s=600.0) as fleet:
        first.health = 503
        first.replies = [answers(500)]
        assert (await ask(fleet))[0] == 500
        assert [replica.ready for replica in fleet.replicas] == [False, True]
        with pytest.raises(EngineBroken) as refused:
            await ask(fleet)
        assert (refused.value.status, refused.value.code) == (502, "engine_died")
        assert second.started == 0
        assert (await ask(fleet, "Hello"))[0] == 200
        await elapse(61)
        assert (await ask(fleet))[0] == 200


@pytest.mark.parametrize("alone", [True, False])
@stepped
async def test_an_engine_that_dies_in_the_middle_of_streams(alone: bool) -> None:
    """What began is broken off. It is suspected if it was alone there."""
    first, second = all_engines = engines(2)
    async with fleet_of(*all_engines, interval_s=600.0) as fleet:
        first.usual = streams(5.0, broken())
        requests = [asyncio.create_task(ask(fleet)) for _ in range(1 if alone else 2)]
        await elapse(1.0)
        first.health = EngineUnavailable("gone")
        for request in requests:
            with pytest.raises(EngineBroken, match="closed the connection"):
                await request
        if alone:
            with pytest.raises(EngineBroken, match="engine died under this request"):
                await ask(fleet)
        else:
            assert (await ask(fleet))[0] == 200
        assert second.started == (not alone)


@stepped
async def test_requests_that_died_together_run_once_more_also_soon_after_an_error_that_was_alone() -> None:
    first, second = all_engines = engines(2)
    async with fleet_of(*all_engines, interval_s=600.0) as fleet:
        first.replies = [answers(500)]
        assert (await ask(fleet))[0] == 200
        death = asyncio.Event()
        first.usual = waits(death, fails(broken()))
        requests = [asyncio.create_task(ask(fleet, f"Hi {number}")) for number in range(6)]
        await settled()
        assert first.started == 7
        first.health = EngineUnavailable("gone")
        death.set()
        assert [status for status, _ in await asyncio.gather(*requests)] == [200] * 6
        assert second.started == 7


@stepped
async def test_a_request_that_cannot_break_an_engine_is_never_suspected() -> None:
    first, second = all_engines = engines(2)
    async with fleet_of(*all_engines, interval_s=600.0) as fleet:
        first.health = 503
        first.replies = [fails(broken())]
        assert (await ask(fleet, digest=None))[0] == 200
        assert (await ask(fleet, digest=None))[0] == 200
        assert _started(first, second) == [1, 2]


@pytest.mark.parametrize("stream", [False, True])
@stepped
async def test_equal_requests_on_engines_that_die_at_once_run_elsewhere(stream: bool) -> None:
    """A machine with four of eight engines fails under a group, whose prompts are equal."""
    all_engines = engines(8)
    async with fleet_of(*all_engines, choose=sticky_least_loaded, interval_s=600.0) as fleet:
        for engine in all_engines[:4]:
            engine.usual = streams(5.0, broken()) if stream else waits(5.0, fails(broken()))
        for engine in all_engines[4:]:
            engine.usual = waits(10.0)
        group = [asyncio.create_task(ask(fleet, goes_on=stream)) for _ in range(32)]
        await elapse(1.0)
        assert _started(*all_engines) == [4] * 8
        for engine in all_engines[:4]:
            engine.health = EngineUnavailable("gone")
        results = await asyncio.gather(*group, return_exceptions=True)
        broken_off = [result for result in results if isinstance(result, EngineBroken)]
        assert len(broken_off) == (16 if stream else 0)
        assert all(error.code != "engine_died" for error in broken_off)
        # turns go on, and so do new sends
        assert (await ask(fleet, goes_on=stream))[0] == 200


# --- replicas that leave meanwhile


@stepped
async def test_nothing_runs_again_on_a_replica_that_was_drained_meanwhile() -> None:
    all_engines = engines(3)
    async with fleet_of(*all_engines) as fleet:
        all_engines[0].replies = [waits(1.0, fails(broken()))]
        request = asyncio.create_task(ask(fleet))
        await settled()
        fleet.replicas[1].draining = True
        fleet.settle_model()
        assert (await request)[0] == 200
        assert _started(*all_engines) == [1, 0, 1]


@pytest.mark.parametrize("removed", [True, False], ids=["removed", "marked down"])
@stepped
async def test_requests_that_hang_on_a_machine_that_is_gone_run_elsewhere(removed: bool) -> None:
    """It breaks no connections: health checks notice, on a removed replica too."""
    first, second = all_engines = engines(2)
    async with fleet_of(*all_engines, interval_s=5.0) as fleet:
        gone_replica = fleet.replicas[0]
        first.hangs = {"/health", "/v1/chat/completions"}
        request = asyncio.create_task(ask(fleet))
        await settled()
        if removed:
            fleet.remove(gone_replica)
            assert fleet.leaving == [gone_replica]
        else:
            gone_replica.mark_down(EngineUnavailable("another request broke"))
        assert (await request)[0] == 200
        await elapse(2.0)
        assert fleet.leaving == []
        assert _started(first, second) == [1, 1]


@stepped
async def test_a_removed_replica_ends_its_streams() -> None:
    first, second = engines(2)
    async with fleet_of(first, second) as fleet:
        first.replies = [streams(30.0)]
        request = asyncio.create_task(ask(fleet))
        await settled()
        fleet.remove(fleet.replicas[0])
        assert (await ask(fleet))[0] == 200
        assert (await request)[1].endswith(b"data: [DONE]\n\n")
        assert _started(first, second) == [1, 1]


# --- what counts against a replica


@pytest.mark.parametrize(
    "bad",
    [
        answers(500),
        fails(broken()),
        fails(EngineTimeout("its event dripped", received=True)),
        answers(200, b"<html>", b"text/html"),
    ],
)
@stepped
async def test_three_failures_in_a_row_eject_a_healthy_replica_until_a_trial_succeeds(bad: Answer) -> None:
    first, other = engines(2)
    async with fleet_of(first, other, interval_s=600.0) as fleet:
        breaker = fleet.replicas[0].breaker
        first.usual = bad
        for _ in range(6):
            await asyncio.gather(ask(fleet), return_exceptions=True)
        assert (first.started, breaker.state) == (3, BreakerState.OPEN)
        assert "no requests for" in fleet.report()[0]["problem"]
        await elapse(6.0)
        await asyncio.gather(*(ask(fleet) for _ in range(8)), return_exceptions=True)
        assert (first.started, breaker.state) == (4, BreakerState.OPEN), "one trial"
        await elapse(12.0)
        first.usual = answers()
        assert (await ask(fleet))[0] == 200
        assert (first.started, breaker.state) == (5, BreakerState.CLOSED)


@stepped
async def test_streams_that_drip_eject_a_replica_too() -> None:
    first, second = engines(2)
    async with fleet_of(first, second) as fleet:
        first.usual = streams(1.0, EngineTimeout("its event dripped", received=True))
        for _ in range(3):
            with pytest.raises(EngineTimeout):
                await ask(fleet)
        assert (await ask(fleet))[0] == 200
        assert (first.started, second.started) == (3, 1)


@stepped
async def test_the_last_replica_is_not_ejected() -> None:
    [only] = engines(1)
    async with fleet_of(only) as fleet:
        only.usual = fails(broken())
        for _ in range(5):
            with pytest.raises(EngineBroken):
                await ask(fleet)
        assert (only.started, fleet.replicas[0].breaker.state) == (5, BreakerState.CLOSED)


@stepped
async def test_timeouts_do_not_count_while_this_process_was_late() -> None:
    first, second = engines(2)
    async with fleet_of(first, second) as fleet:
        first.usual = fails(EngineTimeout("slow", received=True))
        block(3.0)
        await elapse(0.5)
        for _ in range(4):
            assert (await ask(fleet))[0] == 200
        assert (first.started, fleet.replicas[0].breaker.state) == (4, BreakerState.CLOSED)


@stepped
async def test_questions_go_to_another_replica_too() -> None:
    all_engines = engines(3)
    async with fleet_of(*all_engines) as fleet:
        asked: list[str] = []

        async def fail_first(replica: object) -> str:
            asked.append(getattr(replica, "name", ""))
            if len(asked) == 1:
                raise EngineTimeout("slow")
            if len(asked) == 2:
                raise broken()
            return "answer"

        assert await fleet.ask(fail_first) == "answer"
        assert len(set(asked)) == 3
        asked.clear()

        async def fail(replica: object) -> str:
            asked.append(getattr(replica, "name", ""))
            raise broken()

        with pytest.raises(EngineBroken):
            await fleet.ask(fail)
        assert len(asked) == 2
        with pytest.raises(ApiError, match="no replica at"):
            fleet.named("http://other")


# --- capacity


@stepped
async def test_waiting_requests_time_out_or_end_with_the_last_replica_or_run_on_one_that_joins() -> None:
    first, second = engines(2)
    options = {"replica_requests": 1, "queue_requests": 9, "queue_timeout_s": 30.0}
    async with fleet_of(first, interval_s=1.0, **options) as fleet:
        first.usual = waits(100.0)
        running = asyncio.create_task(ask(fleet))
        await settled()
        with pytest.raises(Overloaded) as refused:
            await ask(fleet)
        assert refused.value.code == "queue_timeout"
        waiting = asyncio.create_task(ask(fleet))
        await settled()
        fleet.add(replica_of(second))
        assert (await waiting)[0] == 200
        fleet.remove(fleet.replicas[1])
        waiting = asyncio.create_task(ask(fleet))
        await settled()
        gone(first)
        with pytest.raises(EngineUnavailable):
            await waiting
        assert (await running)[0] == 200


@stepped
async def test_conversations_that_wait_for_their_tools_are_shared_equally() -> None:
    all_engines = engines(3)
    async with fleet_of(*all_engines, choose=sticky_least_loaded) as fleet:
        for number in range(9):
            assert (await ask(fleet, conversation=f"c{number}"))[0] == 200
        assert _started(*all_engines) == [3, 3, 3]
