"""The services that requests are served with, one set per application, and how it stops.

`stopping` is set when the process gets a signal to stop: it still serves, and `/ready` reports it. Later
`cut` ends each running request and each new one with the error `Stopping`.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tokenproxy.base.errors import Stopping
from tokenproxy.fleet.fleet import Fleet
from tokenproxy.fleet.membership import Membership
from tokenproxy.fleet.weight_calls import WeightCalls
from tokenproxy.record.encoders import EncoderPool
from tokenproxy.record.history import History
from tokenproxy.settings import Settings
from tokenproxy.store.guarded import GuardedStore
from tokenproxy.turn.model_aliases import ModelAliases


class RunningRequests:
    """The requests that run. One per application, used from its event loop only."""

    def __init__(self) -> None:
        self.stopping = False
        """Whether the process got a signal to stop. Requests are still served."""
        self._cut = False
        self._blocks: dict[object, asyncio.Task[Any]] = {}
        """The task of each block that `cut` has not ended."""

    @contextmanager
    def cuttable(self) -> Iterator[None]:
        """A block that raises `Stopping` at its current `await` when `cut` is called, or at once after that.

        It works as `asyncio.timeout` does: the task is cancelled, so that everything inside cleans up as for
        a client that leaves, and the cancellation becomes an exception at the end of the block.
        """
        stopping = Stopping(
            "the proxy stopped before the response was complete: send the request again", code="stopping"
        )
        if self._cut:
            raise stopping
        task, block = asyncio.current_task(), object()
        assert task is not None
        before = task.cancelling()
        self._blocks[block] = task
        try:
            yield
        except asyncio.CancelledError as error:
            # a task that its client's disconnect cancels at the same time stays cancelled
            if block not in self._blocks and task.cancelling() <= before + 1:
                raise stopping from error
            raise
        finally:
            if self._blocks.pop(block, None) is None:
                task.uncancel()

    def cut(self) -> int:
        """End the requests inside a `cuttable` block, and refuse new ones. Returns how many there were."""
        self.stopping = self._cut = True
        tasks, self._blocks = list(self._blocks.values()), {}
        for task in tasks:
            task.cancel()
        return len(tasks)


@dataclass(slots=True)
class Services:
    """The services that routes use."""

    fleet: Fleet
    store: GuardedStore
    """The store of `history`."""
    history: History
    admin_calls: WeightCalls
    """Sends the engine's admin routes to all replicas."""
    encoders: EncoderPool
    """Threads for tokenising, which would block the event loop."""
    settings: Settings
    membership: Membership | None = None
    """Adds and removes replicas; None inside vLLM, where there is one engine."""
    model_aliases: ModelAliases = field(default_factory=ModelAliases)
    """The models that serve requests for others."""
    running: RunningRequests = field(default_factory=RunningRequests)
    """The running requests, which are cut off when the process stops."""
