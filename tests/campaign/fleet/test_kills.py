"""Engines that are killed under load: who sees it, when they leave, when they are back."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import pytest

from tests.campaign.fleet.under_load import DEADLY, Clients, KillableEngine
from tests.support.serve_process import ServeProcess
from tests.support.tiny_model import TinyModel

_REQUESTS = 200
_ROUNDS = 5
_BUSY = 5
"""Requests that run on an engine when it is killed, at least."""
_LEFT_S = 1.0
"""Within this time after its death no requests go to an engine."""
_BACK_S = 2.0
"""Within this time after it listens again an engine gets requests."""
_GENERATION_S = 1.0


@contextmanager
def _fleet(
    tiny_model: TinyModel, folder: Path, count: int, seconds: float = _GENERATION_S
) -> Iterator[tuple[list[KillableEngine], str]]:
    with ExitStack() as stack:
        engines = [stack.enter_context(KillableEngine(tiny_model, seconds)) for _ in range(count)]
        urls = [engine.url for engine in engines]
        proxy = stack.enter_context(ServeProcess(urls, folder / "proxy.log", "--store", "memory:"))
        proxy.wait_ready(count)
        yield engines, proxy.url


@pytest.mark.parametrize("count", [2, 3])
def test_killed_engine_costs_no_request_that_had_not_begun(
    tiny_model: TinyModel, tmp_path: Path, count: int
) -> None:
    """One of two or three engines dies under 200 requests, five times."""

    async def kill_and_restart() -> None:
        left_s, back_s = [], []
        async with Clients(url) as clients:
            for number in range(_ROUNDS):
                victim = number % count
                # an engine that came back is tried with one request before it gets its share
                await asyncio.gather(*(clients.ask(n) for n in range(2 * count)))
                requests = [asyncio.create_task(clients.ask(n)) for n in range(_REQUESTS)]
                await engines[victim].wait_busy(_BUSY)
                await asyncio.to_thread(engines[victim].kill)
                left_s.append(await clients.seconds_until_gone(victim))
                await asyncio.gather(*requests)
                await asyncio.to_thread(engines[victim].start)
                back_s.append(await clients.seconds_until_all_ready())
        outcomes = clients.outcomes
        assert not outcomes.failed, outcomes
        assert outcomes.answered + outcomes.broke_off == _ROUNDS * (_REQUESTS + 2 * count)
        # only streams can have begun, and only those of the engine that died
        assert outcomes.broke_off <= _ROUNDS * _REQUESTS / 2
        assert median(left_s) < _LEFT_S, left_s
        assert median(back_s) < _BACK_S, back_s

    with _fleet(tiny_model, tmp_path, count) as (engines, url):
        asyncio.run(kill_and_restart())


def test_request_that_kills_engines_kills_one(tiny_model: TinyModel, tmp_path: Path) -> None:
    """An engine that dies under a request alone: the request does not get a second engine."""

    async def send() -> Clients:
        async with Clients(url) as clients:
            await clients.ask(1, DEADLY)
        return clients

    with _fleet(tiny_model, tmp_path, 3, seconds=0.1) as (engines, url):
        clients = asyncio.run(send())
        assert [engine.alive for engine in engines].count(False) == 1
    assert sum(clients.outcomes.failed.values()) == 1


def test_request_that_kills_engines_among_others_kills_two_at_most(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Nobody can tell which request killed an engine, so each runs once more, and not a third time."""

    async def send() -> Clients:
        async with Clients(url) as clients:
            requests = [asyncio.create_task(clients.ask(n)) for n in range(60)]
            await asyncio.sleep(_GENERATION_S / 3)
            requests.append(asyncio.create_task(clients.ask(1, DEADLY)))
            await asyncio.gather(*requests)
            # a request that did not run with the deadly one is served by the engine that is left
            await clients.ask(1)
        return clients

    with _fleet(tiny_model, tmp_path, 3) as (engines, url):
        clients = asyncio.run(send())
        assert 1 <= [engine.alive for engine in engines].count(False) <= 2
    outcomes = clients.outcomes
    assert outcomes.answered + outcomes.broke_off + sum(outcomes.failed.values()) == 62
    # a third of them runs on the engine that is left, at least
    assert outcomes.answered >= 15, outcomes
