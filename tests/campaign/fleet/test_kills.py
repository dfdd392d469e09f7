"""Engines that are killed under load: who sees it, when they leave, when they are back."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import pytest

from tests.campaign.fleet.under_load import Clients, KillableEngine
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
def _fleet(tiny_model: TinyModel, folder: Path, count: int) -> Iterator[tuple[list[KillableEngine], str]]:
    with ExitStack() as stack:
        engines = [stack.enter_context(KillableEngine(tiny_model, _GENERATION_S)) for _ in range(count)]
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
