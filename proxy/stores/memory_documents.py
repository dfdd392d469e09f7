"""The documents of a store in memory. See `DocumentStore`."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from proxy.history.store import Limits
from proxy.stores.packed import pack_document, unpack_document


class _Record(NamedTuple):
    packed: bytes
    kept: float


class MemoryDocuments:
    """Documents by id, the oldest first."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._bytes = 0

    async def keep(self, document: str, content: bytes) -> None:
        """See `DocumentStore.keep`."""
        packed = await pack_document(content)
        if document in self._records or len(packed) > self._limits.document_bytes:
            return
        self._records[document] = _Record(packed, time.time())
        self._bytes += len(packed)
        while self._bytes > self._limits.document_bytes:
            self._drop(next(iter(self._records)))

    async def read(self, documents: Sequence[str]) -> dict[str, bytes]:
        """See `DocumentStore.read`."""
        oldest = time.time() - self._limits.max_age_s
        found = {name: self._records[name] for name in documents if name in self._records}
        return {name: unpack_document(each.packed) for name, each in found.items() if each.kept >= oldest}

    async def delete(self, document: str) -> bool:
        """See `DocumentStore.delete`."""
        if document not in self._records:
            return False
        self._drop(document)
        return True

    def drop_old(self) -> None:
        """Drop what is too old."""
        oldest = time.time() - self._limits.max_age_s
        while self._records:
            name, record = next(iter(self._records.items()))
            if record.kept >= oldest:
                break
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._bytes -= len(self._records.pop(name).packed)
