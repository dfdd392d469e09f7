"""The services that requests are served with; one set per application."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from tokenproxy.fleet.fleet import Fleet
from tokenproxy.fleet.membership import Membership
from tokenproxy.fleet.weight_calls import WeightCalls
from tokenproxy.record.encoders import EncoderPool
from tokenproxy.record.history import History
from tokenproxy.settings import Settings
from tokenproxy.store.guarded import GuardedStore
from tokenproxy.turn.model_aliases import ModelAliases
from tokenproxy.turn.running import RunningRequests

T = TypeVar("T")


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

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run small `work` on an encoder thread."""
        return await self.encoders.run(work)
