"""The services that requests are served with; one set per application."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from proxy.fleet.fleet import Fleet
from proxy.history.history import History

T = TypeVar("T")


@dataclass(slots=True)
class Services:
    """What routes work with."""

    fleet: Fleet
    history: History
    encoders: ThreadPoolExecutor
    """Threads that tokenise: the event loop never does."""
    body_limit_bytes: int
    record_logprobs: bool = True
    """Whether engines are asked for log-probabilities that no client wants, to record them."""
    record_token_route: bool = True
    """Whether turns of the token route are recorded where they can be placed."""

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` on an encoder thread."""
        return await asyncio.get_running_loop().run_in_executor(self.encoders, work)
