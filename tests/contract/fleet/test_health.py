"""Health checks, discovery, and replicas that accept requests and never answer them."""

import asyncio
import errno
from collections.abc import Callable

import pytest

from tests.contract.fleet.memory_engine import (
    CHAT,
    MemoryEngine,
    answers,
    ask,
    broken,
    engines,
    fails,
    fleet_of,
    gone,
    streams,
    waits,
)
from tests.support.stepped import block, elapse, settled, stepped
from tokenproxy.base.errors import ApiError, EngineBroken, EngineTimeout, EngineUnavailable, OutOfSockets
from tokenproxy.base.http import BytesResponse, Request, Response
from tokenproxy.fleet.choosing import Routing
from tokenproxy.fleet.fleet import Fleet
from tokenproxy.fleet.load import BreakerState
from tokenproxy.monitoring.metrics import ReplicaState


def _no_route() -> EngineUnavailable:
    error = EngineUnavailable("no route")
    error.__cause__ = OSError(errno.EHOSTUNREACH, "no route")
    return error


# --- health checks and discovery


@pytest.mark.parametrize("bad", [503, EngineTimeout("slow"), EngineBroken("reset"), _no_route()], ids=str)
@stepped
async def test_two_health_checks_without_an_answer_take_a_replica_out_of_use(bad: int | ApiError) -> None:
    [only] = engines(1)
    async with fleet_of(only, interval_s=5.0) as fleet:
        [replica] = fleet.replicas
        only.health = bad
        await elapse(5.1)
        assert replica.ready, "one miss is none"
        await elapse(0.5)
        assert (replica.ready, replica.state) == (False, ReplicaState.DOWN)
        assert "/health" in fleet.report()[0]["problem"]
        only.health = 200
        await elapse(0.6)
        assert replica.state is ReplicaState.READY


@stepped
async def test_a_health_check_may_take_five_seconds() -> None:
    [only] = engines(1)
    async with fleet_of(only, interval_s=5.0) as fleet:
        only.hangs.add("/health")
        await elapse(5.0 + 5.0 + 0.5 + 4.9)
        assert fleet.replicas[0].ready
        await elapse(0.2)
        assert not fleet.replicas[0].ready


@stepped
async def test_a_refused_connection_takes_a_replica_out_of_use_at_once() -> None:
    [only] = engines(1)
    async with fleet_of(only, interval_s=5.0) as fleet:
        only.health = EngineUnavailable("refused")
        await elapse(5.1)
        assert not fleet.replicas[0].ready


@stepped
async def test_health_checks_prove_nothing_without_sockets_or_while_this_process_is_late() -> None:
    [only] = engines(1)
    async with fleet_of(only, interval_s=1.0) as fleet:
        only.health = OutOfSockets("too many open files")
        await elapse(10.0)
        assert fleet.replicas[0].ready
        only.health = 503
        for _ in range(4):
            block(3.0)
            await elapse(1.0)
        assert fleet.replicas[0].ready
        await elapse(20.0)
        assert not fleet.replicas[0].ready


@stepped
async def test_a_failed_request_brings_the_next_health_check_forward() -> None:
    first, second = engines(2)
    async with fleet_of(first, second, interval_s=600.0) as fleet:
        first.replies = [fails(EngineTimeout("slow", received=True))]
        first.health = EngineUnavailable("refused")
        assert (await ask(fleet))[0] == 200
        await settled()
        assert [replica.ready for replica in fleet.replicas] == [False, True]


@stepped
async def test_discovery_runs_again_after_an_outage_and_until_it_succeeds() -> None:
    """The engine may have been restarted as another version or with other flags."""
    [only] = engines(1)
    async with fleet_of(only, interval_s=600.0) as fleet:
        [replica] = fleet.replicas
        replica.load.responded = True
        gone(only)
        with pytest.raises(EngineUnavailable):
            await ask(fleet)
        only.takes_ids, only.model, only.gone = False, "other", None
        only.hangs.add("/v1/models")
        await elapse(60.2)
        assert replica.problem == f"{only.name} did not respond within 60 s"
        only.hangs.clear()
        only.describes = lambda path: BytesResponse(500, [], b"") if path == CHAT else None
        await elapse(1.0)
        assert "retrying later" in replica.problem
        only.describes = _raise
        await elapse(1.0)
        assert "RuntimeError: unexpected" in replica.problem, "the watch goes on"
        only.describes = lambda path: None
        await elapse(1.0)
        capabilities = replica.require_capabilities()
        assert capabilities.token_in is None
        assert capabilities.model is not None and capabilities.model.name == "other"
        assert not replica.load.responded, "its first response may take long again"


def _raise(path: str) -> Response:
    raise RuntimeError("unexpected")


# --- silence


async def _served(fleet: Fleet, count: int = 4) -> None:
    for _ in range(count):
        assert (await ask(fleet))[0] == 200


@pytest.mark.parametrize("counts", [True, False])
@stepped
async def test_a_silent_replica_is_ejected_and_its_requests_run_elsewhere(counts: bool) -> None:
    silent, good = engines(2)
    if not counts:
        silent.describes = lambda path: BytesResponse(404, [], b"") if path == "/metrics" else None
    async with fleet_of(silent, good, interval_s=5.0) as fleet:
        await _served(fleet)
        silent.hangs = {CHAT}
        requests = [asyncio.create_task(ask(fleet)) for _ in range(4)]
        assert [status for status, _ in await asyncio.gather(*requests)] == [200] * 4
        [report, _] = fleet.report()
        assert (report["ready"], report["breaker"]) == (True, "open")
        assert "no requests" in report["problem"]
        assert good.started == 4


@stepped
async def test_a_replica_that_answers_the_proxy_and_hangs_for_clients_is_ejected() -> None:
    half, good = engines(2)
    async with fleet_of(half, good, interval_s=600.0) as fleet:
        await _served(fleet)
        half.usual = waits(10_000.0)
        requests = [asyncio.create_task(ask(fleet)) for _ in range(4)]
        assert [status for status, _ in await asyncio.gather(*requests)] == [200] * 4
        breaker = fleet.replicas[0].breaker
        assert (good.started, breaker.state) == (4, BreakerState.OPEN)
        assert "requests on it do not go on" in breaker.reason
        await elapse(6.0)
        trial = asyncio.create_task(ask(fleet))
        await elapse(5.0)
        assert breaker.state is BreakerState.HALF_OPEN
        assert (await trial)[0] == 200
        assert (good.started, breaker.state) == (5, BreakerState.OPEN)
        half.usual = answers()
        await elapse(12.0)
        assert ((await ask(fleet))[0], breaker.state) == (200, BreakerState.CLOSED)


def _counts_no_tokens(engine: MemoryEngine, fleet: Fleet) -> None:
    """But it answers a request for one token."""
    engine.usual = waits(60.0)
    engine.describes = lambda path: BytesResponse(404, [], b"") if path == "/metrics" else None


def _counts_tokens(engine: MemoryEngine, fleet: Fleet) -> None:
    engine.usual = waits(60.0)
    engine.grows = True


def _streams_slowly(engine: MemoryEngine, fleet: Fleet) -> None:
    engine.usual = streams(2.0, events=[b"data: 1\n\n"] * 30)


def _is_paused(engine: MemoryEngine, fleet: Fleet) -> None:
    """By a client of the engine that the proxy does not know."""
    engine.usual = waits(60.0)
    engine.describes = lambda path: _json(b'{"is_paused": true}') if path == "/is_paused" else None


def _cannot_be_asked(engine: MemoryEngine, fleet: Fleet) -> None:
    engine.usual = waits(60.0)
    engine.describes = lambda path: _out_of_sockets() if path == "/metrics" else None


def _json(body: bytes) -> Response:
    return BytesResponse(200, [(b"content-type", b"application/json")], body)


def _out_of_sockets() -> Response:
    raise OutOfSockets("too many open files")


@pytest.mark.parametrize(
    "excuse",
    [
        *(_counts_no_tokens, _counts_tokens, _streams_slowly, _is_paused, _cannot_be_asked),
    ],
)
@stepped
async def test_a_slow_replica_is_not_silent(excuse: Callable[[MemoryEngine, Fleet], None]) -> None:
    slow, other = engines(2)
    async with fleet_of(slow, other) as fleet:
        await _served(fleet)
        excuse(slow, fleet)
        assert (await ask(fleet))[0] == 200
        assert fleet.replicas[0].breaker.state is BreakerState.CLOSED
        assert (slow.started, other.started) == (5, 0)


@stepped
async def test_a_replica_may_be_silent_for_as_long_as_its_recent_prompts_took() -> None:
    slow, other = engines(2)
    async with fleet_of(slow, other) as fleet:
        slow.usual = waits(2.0)
        await _served(fleet)
        slow.usual = waits(9.0)
        assert (await ask(fleet, ids=20))[0] == 200
        slow.usual = waits(200.0)
        assert (await ask(fleet, ids=10))[0] == 200
        assert (slow.started, other.started) == (6, 1)


@stepped
async def test_no_replica_is_ejected_while_this_process_is_late_or_without_another_one() -> None:
    silent, other = engines(2)
    async with fleet_of(silent, other) as fleet:
        await _served(fleet)
        silent.usual = waits(30.0)
        request = asyncio.create_task(ask(fleet))
        for _ in range(8):
            block(2.0)
            await elapse(0.5)
        assert fleet.replicas[0].breaker.state is BreakerState.CLOSED
        gone(other)
        fleet.replicas[1].mark_down(EngineUnavailable("gone"))
        assert (await request)[0] == 200
        assert fleet.replicas[0].breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize("count", [2, 3])
@stepped
async def test_replicas_whose_first_responses_take_long(count: int) -> None:
    """All were just started: the request moves once, and then waits for as long as it takes."""
    all_engines = engines(count)
    async with fleet_of(*all_engines, interval_s=600.0) as fleet:
        for engine in all_engines:
            engine.usual = waits(100.0)
        assert (await ask(fleet))[0] == 200
        assert [engine.started for engine in all_engines] == [1, 1, 0][:count]


async def _eject(fleet: Fleet, bad: MemoryEngine) -> None:
    bad.replies = [fails(broken())] * 3
    await _served(fleet, 3)
    assert fleet.replicas[0].breaker.state is BreakerState.OPEN


@stepped
async def test_a_trial_that_just_began_is_not_decided_by_an_earlier_silence() -> None:
    """Although an earlier request has waited for long, so that the replica looks silent."""
    bad, good = engines(2)
    async with fleet_of(bad, good, interval_s=600.0) as fleet:
        bad.replies = [waits(600.0)]
        earlier = asyncio.create_task(ask(fleet, repeatable=False))
        await settled()
        await _eject(fleet, bad)
        await elapse(6.0)
        bad.usual = waits(600.0)
        trial = asyncio.create_task(ask(fleet))
        await elapse(2.0)
        breaker = fleet.replicas[0].breaker
        assert breaker.state is BreakerState.HALF_OPEN and breaker.trial is not None
        for request in (earlier, trial):
            request.cancel()


@stepped
async def test_a_credential_of_a_client_is_lent_to_a_replica_that_asks_for_one() -> None:
    [only] = engines(1)
    credential = (b"authorization", b"Bearer secret")
    only.requires = credential
    async with fleet_of(only, interval_s=600.0) as fleet:
        [replica] = fleet.replicas
        assert (replica.ready, replica.wants_credential) == (False, True)
        assert (await fleet.send_to_any(Request("GET", "/v1/models"), Routing())).status == 401
        await fleet.lend_credential(credential)
        assert (replica.ready, replica.wants_credential) == (True, False)
        assert await replica.serves("tiny")
        assert not await replica.serves("other")
        only.usual = answers()
        assert (await ask(fleet))[0] == 200
