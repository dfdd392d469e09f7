"""Several processes that share a store, and one that is killed."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.store_utils import Usage, add, digest_of, make_turn, opened, usage
from tokenproxy.record.store import Candidate, Store

_ROOT = Path(__file__).parents[3]
_PROCESSES = 8
_ENDLESS = 10**6


def _start(url: str, *arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.campaign.store.writers", url, *map(str, arguments)]
    return subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True)


def _run(url: str, *arguments: object) -> list[str]:
    """The lines that processes have printed, after they have ended."""
    with _start(url, *arguments) as running:
        printed = running.communicate(timeout=60)[0]
    assert running.returncode == 0
    return printed.split()


async def _found(store: Store, turns: list[str]) -> dict[str, Candidate]:
    """The turn that each turn's own key finds."""
    found = await store.find([digest_of(turn) for turn in turns])
    held = [turn for turn in turns if digest_of(turn) in found]
    return {turn: found[digest_of(turn)].groups[0].candidates[0] for turn in held}


async def test_nothing_is_lost_between_eight_writers(shared_url: str) -> None:
    added = await asyncio.to_thread(_run, shared_url, _PROCESSES, 3, 10, 2**30)
    assert len(added) == 30 * _PROCESSES
    async with opened(shared_url) as store:
        found = await _found(store, added)
        assert [each.turn for each in found.values()] == list(found) == added
        sessions = await store.sessions(limit=100)
        expected = sorted(f"{number}-{chain}" for number in range(_PROCESSES) for chain in range(3))
        assert sorted(session.id for session in sessions) == expected
        assert [session.turns for session in sessions] == [10] * 24
        size = sum(session.size for session in sessions)
        assert await usage(store) == Usage(24, 240, size)
        for rollout in expected:
            turns = await store.turns(rollout)
            assert await store.path(turns[-1].id) == turns
            claims = [await store.claim(digest_of(turn.id), digest_of("ids")) for turn in turns]
            assert claims == [None] * 9 + [turns[-1].id]
        shared = (await store.find([digest_of("shared")]))[digest_of("shared")]
        assert shared.total == 240


async def test_the_sums_are_right_while_all_processes_evict(shared_url: str) -> None:
    limit = 50_000
    added = await asyncio.to_thread(_run, shared_url, _PROCESSES, 15, 2, limit)
    async with opened(shared_url) as store:
        sessions = await store.sessions(limit=1000)
        held = [turn.id for session in sessions for turn in await store.turns(session.id)]
        size = sum(session.size for session in sessions)
        assert await usage(store) == Usage(len(sessions), len(held), size)
        assert 0 < size <= limit
        found = await _found(store, added)
        assert [turn for turn, each in found.items() if each.turn] == [turn for turn in added if turn in held]
        assert found.keys() == set(added)


async def test_what_was_added_survives_a_kill(shared_url: str) -> None:
    with _start(shared_url, 1, 2, _ENDLESS, 2**30) as writer:
        assert writer.stdout is not None
        added = [writer.stdout.readline() for _ in range(50)]
        writer.kill()
        added += writer.stdout.readlines()
    assert writer.returncode == -signal.SIGKILL
    ids = [line.strip() for line in added if line.endswith("\n")]
    async with opened(shared_url) as store:
        found = await _found(store, ids)
        assert [each.turn for each in found.values()] == list(found) == ids
        for rollout in ("0-0", "0-1"):
            turns = await store.turns(rollout)
            assert await store.path(turns[-1].id) == turns
            session = await store.session(rollout)
            assert session is not None and len(turns) == session.turns
        await add(store, make_turn("after"))
        assert len(await store.turns("after")) == 1
