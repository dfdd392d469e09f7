"""What is stored besides turns: whole values under a name, such as the responses of `/v1/responses`."""

from collections.abc import Sequence
from typing import Protocol


class DocumentStore(Protocol):
    """Keeps JSON objects by their ids, within limits of age and bytes. Every method may raise StoreError.

    Beyond `Limits.document_bytes` the oldest are dropped, and so is what is older than `Limits.max_age_s`. A
    document that exceeds this limit alone is not kept.
    """

    async def keep(self, document: str, content: bytes) -> None:
        """Keep a document. Nothing happens if there is one of this id.

        Args:
            document: unique in the store; see `store.session_id` for how it holds the tenant.
            content: a JSON object.
        """
        ...

    async def read(self, documents: Sequence[str]) -> dict[str, bytes]:
        """The contents by id; those that are not kept are missing."""
        ...

    async def delete(self, document: str) -> bool:
        """Remove a document. False if there is none."""
        ...
