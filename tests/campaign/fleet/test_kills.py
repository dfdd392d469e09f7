"""Engines that are killed under load: who sees it, when they leave, when they are back."""

import asyncio
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from tests.support.processes import Clients, KillableEngine, in_thread, run_proxy_process
from tests.support.tiny_model import TinyModel

_REQUESTS, _ROUNDS, _ENGINES = 200, 5, 3
_BUSY = 5
"""Requests that run on an engine when it is killed, at least."""


def test_killed_engine_costs_no_request_that_had_not_begun(tiny_model: TinyModel, tmp_path: Path) -> None:
    async def kill_and_restart() -> None:
        left_s, back_s = [], []
        async with Clients(url) as clients:
            for number in range(_ROUNDS):
                victim = number % _ENGINES
                # an engine that came back is tried with one request before it gets its share
                await asyncio.gather(*(clients.ask(n) for n in range(2 * _ENGINES)))
                requests = [asyncio.create_task(clients.ask(n)) for n in range(_REQUESTS)]
                await engines[victim].wait_busy(_BUSY)
                engines[victim].kill()
                left_s.append(await clients.seconds_until_gone(victim))
                await asyncio.gather(*requests)
                await in_thread(engines[victim].start)
                back_s.append(await clients.seconds_until_all_ready())
        outcomes = clients.outcomes
        assert not outcomes.failed, outcomes
        assert outcomes.answered + outcomes.broke_off == _ROUNDS * (_REQUESTS + 2 * _ENGINES)
        # only streams can have begun, and only those of the engine that died
        assert outcomes.broke_off <= _ROUNDS * _REQUESTS / 2
        assert median(left_s) < 1.0, left_s
        assert median(back_s) < 2.0, back_s

    with ExitStack() as stack:
        engines = [stack.enter_context(KillableEngine(tiny_model.folder, 1.0)) for _ in range(_ENGINES)]
        urls = [engine.url for engine in engines]
        url = stack.enter_context(run_proxy_process(urls, tmp_path / "proxy.log", "--store", "memory:"))
        asyncio.run(kill_and_restart())
