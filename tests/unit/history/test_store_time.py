"""How long a request waits for the store."""

import asyncio
import time

import pytest

from proxy.history.store_time import BACKGROUND_S, abandon_if_cancelled, spending, store_time, within


async def test_time_is_spent_over_all_calls() -> None:
    with spending() as seconds:
        assert seconds == BACKGROUND_S
    with store_time(0.2):
        for _ in range(3):
            with spending():
                await asyncio.sleep(0.05)
        with spending() as left:
            assert 0.0 <= left < 0.06
            await asyncio.sleep(0.1)
        with spending() as left:
            assert left == 0.0
    with spending() as seconds:
        assert seconds == BACKGROUND_S


async def test_tasks_share_the_remaining_time() -> None:
    async def call() -> None:
        with spending():
            await asyncio.sleep(0.1)

    with store_time(0.1):
        await asyncio.create_task(call())
        with spending() as left:
            assert left == 0.0


async def test_work_that_takes_longer_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError):
        await within(0.05, work())
    assert cancelled.is_set()
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()
    await asyncio.sleep(0)


async def test_a_result_that_arrived_while_the_loop_was_busy_counts() -> None:
    arrived: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def block() -> None:
        time.sleep(0.2)
        arrived.set_result("result")

    asyncio.get_running_loop().call_soon(block)
    assert await within(0.05, arrived) == "result"


async def test_cancelled_caller_is_not_a_timeout() -> None:
    task = asyncio.create_task(within(5.0, asyncio.sleep(30)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_timeout_around_it_still_counts() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await within(5.0, asyncio.sleep(30))


async def test_work_that_heeds_no_cancellation_is_abandoned() -> None:
    ended = asyncio.Event()

    async def stubborn() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            await asyncio.sleep(0.2)
            ended.set()
            raise ValueError("nobody looks at this") from None

    start = time.monotonic()
    with pytest.raises(TimeoutError):
        await within(0.02, abandon_if_cancelled(stubborn()))
    assert time.monotonic() - start < 0.15
    await asyncio.wait_for(ended.wait(), 5)
