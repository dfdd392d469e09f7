"""Several processes that share a store, and one that is killed."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

from proxy.history.store import FOUND_AT_MOST, Usage
from tests.stores.store_utils import key_of, make_response, make_turn, opened

_ROOT = Path(__file__).parents[2]
_WRITERS = 8


def _start(
    url: str, processes: int, chains: int, turns: int, max_bytes: int = 2**30
) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.stores.store_writer", url]
    numbers = map(str, (processes, chains, turns, max_bytes))
    return subprocess.Popen([*command, *numbers], cwd=_ROOT, stdout=subprocess.PIPE, text=True)


def _added(url: str, *numbers: int) -> list[str]:
    """The ids that writers have added, once they have ended."""
    with _start(url, _WRITERS, *numbers) as writers:
        printed = writers.communicate(timeout=60)[0]
    assert writers.returncode == 0
    return printed.split()


async def test_nothing_is_lost_between_eight_writers(shared_url: str) -> None:
    added = await asyncio.to_thread(_added, shared_url, 3, 10)
    assert len(added) == 30 * _WRITERS
    async with opened(shared_url) as store:
        found = await store.find([key_of(turn) for turn in added])
        assert found == {key_of(turn): [turn] for turn in added}
        sessions = await store.sessions(limit=100)
        expected = sorted(f"{number}-{chain}" for number in range(_WRITERS) for chain in range(3))
        assert sorted(session.id for session in sessions) == expected
        assert [session.turns for session in sessions] == [10] * 24
        size = sum(session.size for session in sessions)
        assert await store.usage() == Usage(24, 240, size)
        for rollout in expected:
            turns = await store.turns(rollout)
            assert await store.path(turns[-1].id) == turns
            newest = [turn.id for turn in turns][: -FOUND_AT_MOST - 1 : -1]
            assert await store.find([key_of(rollout)]) == {key_of(rollout): newest}


async def test_the_sums_are_right_while_all_evict(shared_url: str) -> None:
    most = 50_000
    added = await asyncio.to_thread(_added, shared_url, 15, 2, most)
    async with opened(shared_url) as store:
        sessions = await store.sessions(limit=1000)
        held = [turn for session in sessions for turn in await store.turns(session.id)]
        size = sum(session.size for session in sessions)
        assert await store.usage() == Usage(len(sessions), len(held), size)
        assert 0 < size <= most
        keys = {key_of(turn) for turn in added}
        found = await store.find(list(keys))
        assert set(found) == {key_of(turn.id) for turn in held}
        assert await store.evicted(list(keys)) == keys - set(found)


async def test_what_was_added_outlives_a_kill(shared_url: str) -> None:
    with _start(shared_url, 1, 2, 10**6) as writer:
        assert writer.stdout is not None
        added = [writer.stdout.readline() for _ in range(50)]
        writer.kill()
        added += writer.stdout.readlines()
    assert writer.returncode == -signal.SIGKILL
    ids = [line.strip() for line in added if line.endswith("\n")]
    async with opened(shared_url) as store:
        assert await store.find([key_of(turn) for turn in ids]) == {key_of(turn): [turn] for turn in ids}
        for rollout in ("0-0", "0-1"):
            turns = await store.turns(rollout)
            assert await store.path(turns[-1].id) == turns
            assert len(turns) == (await store.session(rollout)).turns  # type: ignore[union-attr]
        await store.add([make_turn("after")], [[]])
        assert len(await store.turns("after")) == 1


async def test_all_see_at_once_what_one_has_changed(shared_url: str) -> None:
    async with opened(shared_url) as one, opened(shared_url) as other:
        turn = make_turn()
        await one.add([turn], [[key_of("k")]])
        assert await other.find([key_of("k")]) == {key_of("k"): [turn.id]}
        await other.set_rewards("r", {"": 1.0})
        assert await one.rewards("r") == {"": 1.0}
        assert await other.delete("r")
        assert await one.find([key_of("k")]) == {}
        assert await one.usage() == Usage(0, 0, 0)


async def test_one_of_two_takes_an_answer(shared_url: str) -> None:
    async with opened(shared_url) as one, opened(shared_url) as other:
        for _ in range(20):
            answer = make_response(b"k")
            await one.keep_response(answer)
            taken = await asyncio.gather(one.take_response(answer), other.take_response(answer))
            assert sorted(taken) == [False, True]
        assert await one.answers(b"k") == []


async def test_everything_is_there_after_a_restart(shared_url: str) -> None:
    turn, answer = make_turn(), make_response(b"k")
    async with opened(shared_url) as store:
        await store.add([turn], [[key_of("k")]])
        await store.set_rewards("r", {turn.id: 0.5})
        await store.keep_response(answer)
        session, usage = await store.session("r"), await store.usage()
    async with opened(shared_url) as store:
        assert await store.path(turn.id) == [turn]
        assert await store.find([key_of("k")]) == {key_of("k"): [turn.id]}
        assert await store.rewards("r") == {turn.id: 0.5}
        assert await store.answers(b"k") == [answer]
        assert (await store.session("r"), await store.usage()) == (session, usage)
