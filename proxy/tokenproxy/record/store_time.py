"""Limits how long a request waits for the store, over all its calls together.

    with StoreTime(1.0):       # once for each request
        ...
            limit = running_store_time()    # at each call, which may take `limit.left` seconds
            limit.left -= ...               # and subtracts those that it took

Code outside of such a block is background work, with a limit for each call.
"""

import asyncio
from collections.abc import Awaitable
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

REQUEST_S = 1.0
"""Seconds for a request for a turn, from its first look-up to the record of its last choice."""
BACKGROUND_S = 30.0
"""Seconds for one call that no request waits for: eviction, renewed pins, turns that are recorded later."""

_GRACE_S = 0.01
"""Seconds, longer than one round of the event loop: see `within`."""


_of_request: ContextVar["StoreTime | None"] = ContextVar("store_time", default=None)


class StoreTime:
    """The remaining time of a request. In a `with`, of the block and of the tasks that it creates.

    Time that an inner block used before it failed is subtracted from the outer one too: a request waits once
    for a store that does not respond. If the store answers, nothing is subtracted: a turn that goes on after
    many breaks reads at each of them.
    """

    __slots__ = ("_before", "_outer", "_seconds", "left")

    def __init__(self, seconds: float) -> None:
        self.left = self._seconds = seconds

    def renew(self) -> None:
        """Reset it to the seconds that it began with."""
        self.left = max(self.left, self._seconds)

    def __enter__(self) -> None:
        self._outer = _of_request.get()
        self._before = _of_request.set(self)

    def __exit__(self, *error: object) -> None:
        _of_request.reset(self._before)
        if self._outer is not None and error[0] is not None:
            self._outer.left -= self._seconds - self.left


def add_store_time(seconds: float) -> None:
    """Give the request of the current block more time, because it needs more calls than others."""
    limit = _of_request.get()
    if limit is not None:
        limit.left += seconds


def renew_store_time() -> None:
    """Reset the remaining time of the request of the current block, whose turn goes on after a break."""
    limit = _of_request.get()
    if limit is not None:
        limit.renew()


def running_store_time() -> StoreTime:
    """The remaining time of the request of the current block; that of one call in background work."""
    return _of_request.get() or StoreTime(BACKGROUND_S)


async def within(seconds: float, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if it takes longer.

    If the event loop was blocked past the deadline, a result that arrived meanwhile still counts.
    `asyncio.timeout` would raise, and a task for each call would cost three times as much.

    Raises:
        TimeoutError: it took longer.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    before, done, expired = task.cancelling(), False, False

    def expire() -> None:
        nonlocal expired
        if not done:
            expired = True
            task.cancel()

    timer = loop.call_later(seconds, loop.call_later, _GRACE_S, expire)
    try:
        return await work
    except asyncio.CancelledError:
        # a task that is cancelled for another reason too stays cancelled
        if expired and task.cancelling() <= before + 1:
            raise TimeoutError from None
        raise
    finally:
        done = True
        timer.cancel()
        if expired:
            task.uncancel()
