"""How long a request waits for the store."""

import asyncio
import time

import pytest

from tokenproxy.record.store_time import within
from tokenproxy.store.redis_servers import abandon_if_cancelled


async def test_a_result_that_arrived_while_the_loop_was_busy_counts() -> None:
    arrived: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def block() -> None:
        time.sleep(0.04)
        arrived.set_result("result")

    asyncio.get_running_loop().call_soon(block)
    assert await within(0.01, arrived) == "result"


async def test_work_that_heeds_no_cancellation_is_abandoned() -> None:
    goes_on, ended = asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await goes_on.wait()
            ended.set()
            raise ValueError("nobody looks at this") from None

    with pytest.raises(TimeoutError):
        await within(0.01, abandon_if_cancelled(stubborn()))
    assert not ended.is_set()
    goes_on.set()
    await asyncio.wait_for(ended.wait(), 15)
