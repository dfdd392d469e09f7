"""The services that requests are served with; one set per application."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from proxy.fleet.fleet import Fleet
from proxy.history.retries import Retries
from proxy.history.rollouts import Rollouts

T = TypeVar("T")


@dataclass(slots=True)
class Services:
    """What the dialects work with; one per application."""

    fleet: Fleet
    encoders: ThreadPoolExecutor
    """Threads that tokenise: the event loop never does."""
    body_limit_bytes: int
    rollouts: Rollouts
    retries: Retries
    record_logprobs: bool = True
    """Whether log-probabilities are asked of the engine for the record, though no client wants them."""

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` on an encoder thread."""
        return await asyncio.get_running_loop().run_in_executor(self.encoders, work)
