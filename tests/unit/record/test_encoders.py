"""The threads that tokenise: bounds, lanes, and work that is dropped when its client leaves."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator

import pytest

from tests.support.utils import until
from tokenproxy.base.errors import Overloaded
from tokenproxy.record.encoders import LARGE, LARGE_PARSED, EncoderPool

_PATIENCE_S = 20.0


class Held:
    """Work that runs until it is released."""

    def __init__(self) -> None:
        self.began, self.release = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.began.set()
        assert self.release.wait(_PATIENCE_S)
        return "held"


@pytest.fixture
async def pool() -> AsyncIterator[EncoderPool]:
    made = EncoderPool(1, 100 * LARGE)
    yield made
    await asyncio.to_thread(made.shutdown)


async def began(work: Held) -> None:
    assert await asyncio.to_thread(work.began.wait, _PATIENCE_S)


async def test_small_work_does_not_wait_for_large_work(pool: EncoderPool) -> None:
    held = [Held() for _ in range(3)]
    tasks = [asyncio.create_task(pool.run(work, LARGE + 1, tokenises=True)) for work in held]
    await began(held[0])
    assert await pool.run(lambda: "small", LARGE, tokenises=True) == "small"
    assert await pool.run(lambda: "parsed", LARGE_PARSED) == "parsed"
    # large work runs one at a time
    assert [work.began.is_set() for work in held] == [True, False, False]
    for work in held:
        work.release.set()
    assert await asyncio.gather(*tasks) == ["held"] * 3


async def test_work_that_fails_leaves_nothing_in_memory(pool: EncoderPool) -> None:
    """Its input may be tens of megabytes, and a cycle around it would wait for the garbage collector."""
    inputs: list[weakref.ref[Held]] = []

    def work() -> None:
        held = Held()
        inputs.append(weakref.ref(held))
        raise ValueError("too long")

    gc.disable()
    try:
        with pytest.raises(ValueError, match="too long"):
            await pool.run(work)
        await until(lambda: inputs[0]() is None)
    finally:
        gc.enable()


async def test_input_beyond_the_limit_is_refused(pool: EncoderPool) -> None:
    held = Held()
    task = asyncio.create_task(pool.run(held, 90 * LARGE))
    await began(held)
    with pytest.raises(Overloaded) as refused:
        await pool.run(lambda: None, 11 * LARGE)
    assert (refused.value.status, refused.value.code) == (429, "encoders_busy")
    assert refused.value.retry_after
    assert await pool.run(lambda: "fits", 10 * LARGE_PARSED // 16) == "fits"
    held.release.set()
    await task
    await until(lambda: pool.bytes_in_use == 0)
    # alone, it is bounded by the size of a request
    assert await pool.run(lambda: "alone", 1000 * LARGE) == "alone"


async def test_waiting_work_is_dropped_when_its_client_leaves(pool: EncoderPool) -> None:
    held, dropped, last = Held(), Held(), Held()
    first = asyncio.create_task(pool.run(held, 60 * LARGE, tokenises=True))
    await began(held)
    second = asyncio.create_task(pool.run(dropped, 40 * LARGE, tokenises=True))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert pool.bytes_in_use == 60 * LARGE
    third = asyncio.create_task(pool.run(last, 40 * LARGE, tokenises=True))
    held.release.set()
    last.release.set()
    assert list(await asyncio.gather(first, third)) == ["held"] * 2
    assert not dropped.began.is_set()


async def test_cancelled_running_work_is_signalled_and_counts_until_it_ends(pool: EncoderPool) -> None:
    stop, held = threading.Event(), Held()
    task = asyncio.create_task(pool.run(held, 60 * LARGE, tokenises=True, stop=stop))
    await began(held)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stop.is_set() and pool.bytes_in_use == 60 * LARGE
    held.release.set()
    await until(lambda: pool.bytes_in_use == 0)
    assert await pool.run(lambda: "next", 60 * LARGE, tokenises=True) == "next"
