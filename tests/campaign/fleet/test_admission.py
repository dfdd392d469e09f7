"""Conversations that do not fit into the caches together: on modelled engines, and on a real one on CPU."""

import asyncio
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tests.campaign.fleet.simulated import ModelledEngine, agents
from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, start_engine, wait_ready
from tests.contract.fleet.memory_engine import fleet_of
from tests.support.serve_process import ServeProcess
from tests.support.stepped import stepped
from tests.support.talk import CHAT, user
from tokenproxy.demo.checkpoint import ensure_checkpoint
from tokenproxy.fleet.choosing import sticky_least_loaded
from tokenproxy.fleet.fleet import ADMISSION_WAIT_S

_REPLICAS, _SESSIONS = 8, 2_000
_GROUP_AT_S = 60.0


@dataclass
class _Simulation:
    seconds: float
    cached: float
    """Share of the prompts' ids that came from the caches."""
    group_s: float
    """The longest wait of the group's agents for their first responses."""


async def _simulate(start_s: float, wait_s: float) -> _Simulation:
    """2,000 agents that start within `start_s` seconds, and after a minute a group of 16 with one prompt."""
    draw = random.Random(2026)
    engines = [ModelledEngine(f"http://engine-{number}:8000") for number in range(_REPLICAS)]
    crowd = agents(_SESSIONS, draw)
    group = agents(16, draw, name="group", group=16)
    async with fleet_of(*engines, choose=sticky_least_loaded, admission_wait_s=wait_s) as fleet:
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            for number, agent in enumerate(crowd):
                tasks.create_task(agent.run(fleet, start_s * number / _SESSIONS))
            for agent in group:
                tasks.create_task(agent.run(fleet, _GROUP_AT_S))
        seconds = asyncio.get_running_loop().time() - began
    totals = [engine.modelled.totals for engine in engines]
    cached = sum(each.cached_ids for each in totals) / sum(each.prompt_ids for each in totals)
    return _Simulation(seconds, cached, max(agent.waits_s[0] for agent in group))


@pytest.mark.timeout(300)
@stepped
async def test_a_group_waits_no_longer_than_without_admission_by_more_than_the_bound() -> None:
    """All sessions at once are five times as many as fit."""
    without, admitted = [await _simulate(0.0, wait_s) for wait_s in (0.0, ADMISSION_WAIT_S)]
    assert admitted.group_s < without.group_s + ADMISSION_WAIT_S, (without, admitted)
    assert admitted.seconds < 0.95 * without.seconds, (without, admitted)
    patient = await _simulate(0.0, 3600.0)
    assert patient.seconds < 0.7 * without.seconds, (without, patient)
    assert patient.cached > 0.5 > without.cached


@pytest.mark.timeout(300)
@stepped
async def test_admission_costs_nothing_where_the_caches_suffice() -> None:
    without, admitted = [await _simulate(600.0, wait_s) for wait_s in (0.0, ADMISSION_WAIT_S)]
    assert without.cached > 0.8, "they suffice"
    assert admitted.seconds < 1.03 * without.seconds, (without, admitted)
    assert admitted.cached > without.cached - 0.03


# --- a real engine

_CONVERSATIONS, _TURNS, _PAUSE_S = 30, 5, 1.5
_WORDS = [
    "table",
    "river",
    "stone",
    "window",
    "garden",
    "letter",
    "mountain",
    "engine",
    "paper",
    "silver",
    "orange",
    "market",
]
_OPENING_WORDS = 880


@dataclass
class _Run:
    seconds: float = 0.0
    prompt_ids: int = 0
    """Of all turns but the first ones."""
    cached_ids: int = 0
    turns: int = 0

    @property
    def cached(self) -> float:
        """Share of the ids of later turns that came from the cache."""
        return self.cached_ids / self.prompt_ids


async def _converse(client: aiohttp.ClientSession, seed: str, run: _Run) -> None:
    draw = random.Random(seed)
    messages = [user(" ".join(draw.choice(_WORDS) for _ in range(_OPENING_WORDS)))]
    for turn in range(_TURNS):
        await asyncio.sleep(_PAUSE_S if turn else 0.0)
        body = {"model": "smollm2", "messages": messages, "max_tokens": 8, "temperature": 0.0}
        async with client.post(CHAT, json=body) as response:
            answer = await response.json()
        usage = answer["usage"]
        run.turns += 1
        if turn:
            assert response.headers["x-prompt-source"] == "extended"
            run.prompt_ids += usage["prompt_tokens"]
            run.cached_ids += (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        messages += [answer["choices"][0]["message"], user(f"Word {turn + 1}?")]


async def _hold_all(url: str, seed: str, limit_s: float | None = None) -> _Run:
    """All conversations at once, none of which tells that it ended; those that last longer are cut."""
    run, began = _Run(), time.monotonic()
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(url, timeout=timeout) as client:
        held = [_converse(client, f"{seed} {number}", run) for number in range(_CONVERSATIONS)]
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*held), limit_s)
    run.seconds = time.monotonic() - began
    return run


@pytest.mark.timeout(START_TIMEOUT_S + 600)
def test_conversations_that_do_not_fit_keep_their_ids_in_the_cache(tmp_path: Path) -> None:
    """The engine's cache holds 23,000 ids. The proxy in front of it is told nothing."""
    with start_engine(ensure_checkpoint(), tmp_path / "vllm.log", plugin=False) as engine:
        engine.wait_ready(START_TIMEOUT_S)

        def hold_all(name: str, *flags: str, limit_s: float | None = None) -> _Run:
            log = tmp_path / f"{name}.log"
            with ServeProcess([engine.url], log, "--store", "memory:", *flags) as proxy:
                wait_ready(proxy.url)
                return asyncio.run(_hold_all(proxy.url, name, limit_s))

        admitted = hold_all("admitted")
        assert admitted.turns == _CONVERSATIONS * _TURNS
        assert admitted.cached > 0.85, admitted
        without = hold_all("without", "--admission-wait-s", "0", limit_s=2 * admitted.seconds)
    print(admitted, without)
    assert without.cached < 0.3
    # a third to half of the time, if no other program uses more of the cores during one of the runs
    assert admitted.seconds < 0.75 * without.seconds, (admitted, without)
