"""The services that requests are served with, one set per application, and how it stops.

`stopping` is set when the process gets a signal to stop: it still serves, and `/ready` reports it. Later
`cut` ends each running request and each new one with the error `Stopping`.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

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
        self.is_cut = False
        self.blocks: dict[object, asyncio.Task[Any]] = {}
        """The task of each block that `cut` has not ended; see `tokenproxy.web.endpoint.Interruptible`."""

    def cut(self) -> int:
        """End the requests in their blocks, and refuse new ones. Returns how many there were."""
        self.stopping = self.is_cut = True
        tasks, self.blocks = list(self.blocks.values()), {}
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
