"""How stores keep their limits: in short steps, so that other writers get in between."""

import asyncio
from collections.abc import Awaitable, Callable

from proxy.history.store import Evicted, Limits

STEP = 512
"""Rollouts and turns that one step evicts. The last rollout may exceed it: a rollout is evicted whole."""


def eviction_target(limits: Limits) -> int:
    """Bytes that may remain when eviction is needed: below the limit, so that not every call evicts."""
    return limits.max_bytes * 9 // 10


def add_evicted(first: Evicted, second: Evicted) -> Evicted:
    """The sum of both."""
    return Evicted(first.rollouts + second.rollouts, first.turns + second.turns, first.size + second.size)


async def evict_in_steps(lock: asyncio.Lock, step: Callable[[], Awaitable[Evicted]]) -> Evicted:
    """Repeat a step until it evicts nothing.

    Args:
        lock: shared by all tasks of one store. Without it the steps of many tasks would end up in one
            transaction, and other processes would wait for all of them.
    """
    total = Evicted()
    async with lock:
        while (evicted := await step()).rollouts:
            total = add_evicted(total, evicted)
    return total
