"""A store in memory whose calls can be held up, or fail."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from proxy.history.store import Limits
from proxy.stores.memory import MemoryStore


class Patient:
    """A store in memory whose calls can be held up, or fail."""

    def __init__(self) -> None:
        self.store = MemoryStore(Limits())
        self.feed = _PatientPart(self, "feed")
        self.documents = _PatientPart(self, "document")
        self.held: set[str] = set()
        """Methods whose calls wait until they are let go. The feed's are `feed_...`, those of documents
        `document_...`."""
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
                await asyncio.sleep(0.002)
            if name in self.errors:
                raise self.errors[name]
            if name == "add":
                self.added += [turn.id for turn in args[1]]
            return await method(*args, **kwargs)

        return call


class _PatientPart:
    """The feed or the documents of a `Patient`."""

    def __init__(self, patient: Patient, name: str) -> None:
        self._patient = patient
        self._name = name

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        part = self._patient.store.feed if self._name == "feed" else self._patient.store.documents
        return self._patient.call(f"{self._name}_{method}", getattr(part, method))
