"""Replicas that report good health and serve badly: they get no requests soon, and clients hardly notice."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from proxy.fleet.lateness import Lateness
from tests.support.fake_vllm import Canned, FakeVllm, Reply, Seen
from tests.support.processes import CHAT, Clients
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy

_CLIENTS = 16
_GONE_S = 10.0
"""Within this time a bad replica must be out of use."""
_WATCHED_S = 3.0
"""How long after that its requests are counted."""
_MOST_TRIALS = 6
"""Requests that it may get meanwhile, of hundreds, to find out whether it is well again."""
_MOST_FAILURES = 3
"""Requests that may fail before it is out of use."""


def _fails(engine: FakeVllm) -> None:
    engine.canned[CHAT] = Canned(b'{"error":{"message":"CUDA error"}}', 500)


def _resets(engine: FakeVllm) -> None:
    engine.hang_up = lambda seen: seen.path == CHAT


def _returns_html(engine: FakeVllm) -> None:
    page = b"<html><body>Bad gateway</body></html>"
    engine.canned[CHAT] = Canned(page, 200, {"content-type": "text/html"})


def _hangs(engine: FakeVllm) -> None:
    engine.slow_s[CHAT] = 600.0


def _drips(engine: FakeVllm) -> None:
    engine.usual = Reply(drip_s=1.0)


_WAYS: list[Callable[[FakeVllm], None]] = [_fails, _resets, _returns_html, _hangs, _drips]


@pytest.mark.parametrize("go_bad", _WAYS, ids=lambda way: way.__name__.strip("_"))
def test_bad_replica_is_out_of_use_soon(tiny_model: TinyModel, go_bad: Callable[[FakeVllm], None]) -> None:
    with ExitStack() as stack:
        bad, *good = [stack.enter_context(FakeVllm(tiny_model)) for _ in range(3)]
        client = stack.enter_context(run_proxy([bad, *good], watch_interval_s=1.0))
        clients = asyncio.run(_watch(str(client.base_url), bad, go_bad))
        assert client.get("/ready").status_code == 200
    outcomes = clients.outcomes
    failures = sum(outcomes.failed.values()) + outcomes.broke_off
    assert failures <= _MOST_FAILURES, outcomes
    assert outcomes.answered > 10 * _CLIENTS


async def _watch(url: str, bad: FakeVllm, go_bad: Callable[[FakeVllm], None]) -> Clients:
    """Let clients send requests in a loop; a second later the replica goes bad."""
    done = asyncio.Event()
    async with Clients(url) as clients:
        loops = [asyncio.create_task(_repeat(clients, number, done)) for number in range(_CLIENTS)]
        await asyncio.sleep(1.0)
        assert _generations(bad), "the replica got no requests while it was well"
        go_bad(bad)
        await _sleep_on_time(_GONE_S)
        before = _generations(bad)
        await asyncio.sleep(_WATCHED_S)
        trials = _generations(bad) - before
        assert trials <= _MOST_TRIALS, f"{trials} requests in {_WATCHED_S:g} s"
        # its health was fine all the time: that is not what took it out of use
        assert bad.healthy
        done.set()
        await asyncio.wait_for(asyncio.gather(*loops), 30.0)
    return clients


async def _sleep_on_time(seconds: float) -> None:
    """Wait without a pause of this process: after one the proxy blames no replica for a while."""
    lateness = Lateness()
    lateness.start()
    await asyncio.sleep(seconds)
    while lateness.was_late:  # noqa: ASYNC110 - nothing tells when
        await asyncio.sleep(seconds)
    await lateness.stop()


async def _repeat(clients: Clients, number: int, done: asyncio.Event) -> None:
    while not done.is_set():
        await clients.ask(number)
        await asyncio.sleep(0.05)  # the engines share the interpreter with the clients


def _generations(engine: FakeVllm) -> int:
    """Requests of clients that it got, without questions of the proxy."""
    return sum(_is_generation(seen) for seen in engine.seen(CHAT))


def _is_generation(seen: Seen) -> bool:
    return bool(seen.json.get("max_tokens") != 1)
