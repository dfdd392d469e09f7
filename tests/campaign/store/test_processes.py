"""Several processes that share a store."""

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from tests.support.store_utils import Usage, add, digest_of, entry, make_turn, opened, usage
from tokenproxy.record.store import Limits, Store
from tokenproxy.record.turn import Candidate

_PROCESSES = 8


async def _add_chain(store: Store, rollout: str, turns: int) -> list[str]:
    added: list[str] = []
    for _ in range(turns):
        turn = make_turn(rollout, parent=added[-1] if added else None)
        await add(store, turn, entry(turn.id, "ids"), entry("shared"))
        added.append(turn.id)
    return added


async def _add(url: str, process: int, chains: int, turns: int, max_bytes: int) -> list[str]:
    async with opened(url, Limits(max_bytes=max_bytes)) as store:
        rollouts = [f"{process}-{number}" for number in range(chains)]
        added = await asyncio.gather(*(_add_chain(store, rollout, turns) for rollout in rollouts))
    return [turn for chain in added for turn in chain]


def _write(*arguments: object) -> list[str]:
    return asyncio.run(_add(*arguments))  # type: ignore[arg-type]


async def _written(url: str, *sizes: int) -> list[str]:
    """The ids of the turns that all processes have added at once."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_PROCESSES, mp_context=spawn) as pool:
        running = [pool.submit(_write, url, number, *sizes) for number in range(_PROCESSES)]
        written = await asyncio.gather(*map(asyncio.wrap_future, running))
    return [turn for each in written for turn in each]


async def _found(store: Store, turns: list[str]) -> dict[str, Candidate]:
    """The turn that each turn's own key finds."""
    found = await store.find([digest_of(turn) for turn in turns])
    held = [turn for turn in turns if digest_of(turn) in found]
    return {turn: found[digest_of(turn)].groups[0].candidates[0] for turn in held}


async def test_nothing_is_lost_between_eight_writers(shared_url: str) -> None:
    added = await _written(shared_url, 3, 10, 2**30)
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
    added = await _written(shared_url, 15, 2, limit)
    async with opened(shared_url) as store:
        sessions = await store.sessions(limit=1000)
        held = [turn.id for session in sessions for turn in await store.turns(session.id)]
        size = sum(session.size for session in sessions)
        assert await usage(store) == Usage(len(sessions), len(held), size)
        assert 0 < size <= limit
        found = await _found(store, added)
        assert [turn for turn, each in found.items() if each.turn] == [turn for turn in added if turn in held]
        assert found.keys() == set(added)
