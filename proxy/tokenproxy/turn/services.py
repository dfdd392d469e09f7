"""The services that requests are served with, one set per application, and how it stops.

`stopping` is set when the process gets a signal to stop: it still serves, and `/ready` reports it. Later
`cut` ends each running request and each new one with the error `Stopping`.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from msgspec.structs import replace

from chat_tokenizer.cache import BoundedCache
from tokenproxy.base.fields import raw, read
from tokenproxy.base.request import ChatRequest
from tokenproxy.base.types import Fields
from tokenproxy.fleet.fleet import Fleet
from tokenproxy.fleet.membership import Membership
from tokenproxy.fleet.weight_calls import WeightCalls
from tokenproxy.record.encoders import EncoderPool
from tokenproxy.record.history import History
from tokenproxy.record.session_keys import SessionKeys
from tokenproxy.record.store import Session
from tokenproxy.settings import Settings
from tokenproxy.store.guarded import GuardedStore

_UNKNOWN_S = 1.0
"""How long a name counts as not served until the engines are asked again: it may name a new adapter."""
_MOST_NAMES = 256


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


class ModelAliases:
    """Maps the model that a client names to one that is served: side calls name models that nobody serves.

    A name that an engine serves, base model or adapter, is never mapped. One per application.
    """

    def __init__(self, aliases: Sequence[str] = (), *, clock: Callable[[], float] = time.monotonic) -> None:
        """The setting `model_aliases`.

        Args:
            aliases: each as PATTERN=MODEL, where `*` stands for any characters, and case counts. The first
                whose pattern matches a name decides.

        Raises:
            ValueError: a text is not an alias.
        """
        self._aliases: list[tuple[str, str]] = []
        for alias in aliases:
            pattern, _, model = (part.strip() for part in alias.partition("="))
            if not pattern or not model:
                raise ValueError(
                    f"{alias!r} is not an alias: write it as NAME=MODEL, as in haiku=MODEL or *=MODEL"
                )
            # only `*` is special: a name may hold brackets
            self._aliases.append((pattern.replace("[", "[[]").replace("?", "[?]"), model))
        self._clock = clock
        self._asked: dict[str, float] = {}
        """When, on `clock`, the engines were last asked for each name that they do not serve."""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._aliases)

    async def served_name(self, name: str, fleet: Fleet) -> str:
        """The name of the model that serves requests for `name`; `name` itself if there is no alias for it.

        Raises:
            EngineUnavailable, EngineTimeout, EngineBroken: no engine says which models it serves.
        """
        model = next((model for pattern, model in self._aliases if fnmatchcase(name, pattern)), name)
        return name if model == name or await self._serves(name, fleet) else model

    async def map(self, request: ChatRequest, fleet: Fleet) -> ChatRequest:
        """The request for the model that serves it; see `ChatRequest.requested_model`.

        Raises: as `served_name`.
        """
        if not self._aliases or request.model is None:
            return request
        served = await self.served_name(request.model, fleet)
        if served == request.model:
            return request
        fields = {**request.fields, "model": raw(served)}
        return replace(request, fields=fields, model=served, requested_model=request.model)

    async def map_fields(self, fields: Fields, fleet: Fleet) -> bool:
        """Set `model` of a request to the model that serves it; whether that differs.

        Raises:
            BadRequest: `model` is not a string.
            EngineUnavailable, EngineTimeout, EngineBroken: as `served_name`.
        """
        name = read(fields, "model", str) if self._aliases else None
        if name is None or (served := await self.served_name(name, fleet)) == name:
            return False
        fields["model"] = raw(served)
        return True

    async def _serves(self, name: str, fleet: Fleet) -> bool:
        ready = [replica.capabilities for replica in fleet.replicas if replica.ready and replica.capabilities]
        if any(name in capabilities.models for capabilities in ready):
            return True
        if self._clock() < self._asked.get(name, -math.inf) + _UNKNOWN_S:
            return False
        if await fleet.ask(lambda replica: replica.serves(name)):
            return True
        if len(self._asked) >= _MOST_NAMES:
            self._asked.clear()
        self._asked[name] = self._clock()
        return False


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
    session_keys: SessionKeys | None = None
    """Keys for one session each; None where the proxy has no keys."""
    membership: Membership | None = None
    """Adds and removes replicas; None inside vLLM, where there is one engine."""
    model_aliases: ModelAliases = field(default_factory=ModelAliases)
    """The models that serve requests for others."""
    last_sessions: BoundedCache[str, Session] = field(default_factory=lambda: BoundedCache(10_000))
    """Sessions as they were read last, by their ids, for keys that take turns alone: their limits and policy
    hold while the store does not respond."""
    large_documents: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a stored response of many bytes is read."""
    running: RunningRequests = field(default_factory=RunningRequests)
    """The running requests, which are cut off when the process stops."""

    async def end_keys(self, rollout: str) -> None:
        """End the keys of a session that is finished or deleted. Raises StoreError."""
        if self.session_keys is not None:
            await self.session_keys.end(rollout)
