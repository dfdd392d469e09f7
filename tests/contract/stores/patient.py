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
        self.feed = _PatientPart(self, "feed")
        self.documents = _PatientPart(self, "documents")
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


class _PatientPart:
    """The feed or the documents of a `Patient`: methods have their names after `feed_` or `document_`."""

    def __init__(self, patient: Patient, part: str) -> None:
        self._patient = patient
        self._part = part

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        return self._patient.call(
            f"{self._part.removesuffix('s')}_{name}", getattr(getattr(self._patient.store, self._part), name)
        )


async def well(store: GuardedStore) -> None:
    """Wait until the store works again."""
    async with asyncio.timeout(5):
        while store.health().state != "ok":  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.005)
