"""The documents of a guarded store: calls are made, skipped and limited in time as those of the store."""

from collections.abc import Sequence

from proxy.history.documents import DocumentStore
from proxy.stores.guarded_calls import GuardedCalls


class GuardedDocuments:
    """The documents of a store that may stall, fail, or be missing at first."""

    def __init__(self, documents: DocumentStore, calls: GuardedCalls) -> None:
        self._documents = documents
        self._calls = calls

    async def keep(self, document: str, content: bytes) -> None:
        """See `DocumentStore.keep`."""
        await self._calls.write(self._documents.keep, document, content)

    async def read(self, documents: Sequence[str]) -> dict[str, bytes]:
        """See `DocumentStore.read`."""
        return await self._calls.read(self._documents.read, documents)

    async def delete(self, document: str) -> bool:
        """See `DocumentStore.delete`."""
        return await self._calls.write(self._documents.delete, document)
