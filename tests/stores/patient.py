"""A store whose calls can be held up, or fail."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from proxy.history.store import Limits
from proxy.stores.guarded import GuardedStore
from proxy.stores.memory import MemoryStore


class Patient:
    """A store in memory whose calls can be held up, or fail."""

    def __init__(self) -> None:
        self.store = MemoryStore(Limits())
        self.feed = _PatientFeed(self)
        self.held: set[str] = set()
        """Methods whose calls wait until they are let go."""
        self.errors: dict[str, Exception] = {}
        """What methods raise."""
        self.calls: list[str] = []
        self.added: list[str] = []
        """Turns in the order in which they were added."""

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        return self.call(name, getattr(self.store, name))

    def call(self, name: str, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """A method of the store that may be held up, or fail."""

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            while name in self.held:  # noqa: ASYNC110 - a test lets it go
                await asyncio.sleep(0.005)
            if name in self.errors:
                raise self.errors[name]
            if name == "add":
                self.added += [turn.id for turn in args[1]]
            return await method(*args, **kwargs)

        return call


class _PatientFeed:
    """The feed of a `Patient`, whose methods have the same names with `feed_` before them."""

    def __init__(self, patient: Patient) -> None:
        self._patient = patient

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        return self._patient.call(f"feed_{name}", getattr(self._patient.store.feed, name))


async def well(store: GuardedStore) -> None:
    """Wait until the store works again."""
    async with asyncio.timeout(5):
        while store.health().state != "ok":  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.005)
