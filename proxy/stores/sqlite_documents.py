"""The documents of a SQLite store. See `DocumentStore`."""

import sqlite3
import time
from collections.abc import Sequence

from proxy.history.store import Limits
from proxy.stores.eviction import STEP
from proxy.stores.packed import pack_document, unpack_document
from proxy.stores.sqlite_index import in_chunks, question_marks
from proxy.stores.sqlite_threads import Database, MemoryDatabase

DOCUMENT_TABLES = (
    """CREATE TABLE IF NOT EXISTS documents (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, kept REAL NOT NULL, size INTEGER NOT NULL,
        packed BLOB NOT NULL
    )""",
    "CREATE TABLE IF NOT EXISTS document_totals (bytes INTEGER NOT NULL)",
    "INSERT INTO document_totals SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM document_totals)",
)
"""`bytes` is the sum of all `size`, so that no write has to add them up."""


class SqliteDocuments:
    """The documents in the database of a store."""

    def __init__(self, database: Database | MemoryDatabase, limits: Limits) -> None:
        self._database = database
        self._limits = limits

    async def keep(self, document: str, content: bytes) -> None:
        """See `DocumentStore.keep`."""
        packed = await pack_document(content)
        if len(packed) > self._limits.document_bytes:
            return
        row = (document, time.time(), len(packed), packed)

        def work(connection: sqlite3.Connection) -> None:
            insert = "INSERT OR IGNORE INTO documents (id, kept, size, packed) VALUES (?, ?, ?, ?)"
            if connection.execute(insert, row).rowcount:
                connection.execute("UPDATE document_totals SET bytes = bytes + ?", (len(packed),))
                while _drop(connection, self._limits.document_bytes, 0.0) == STEP:
                    pass

        await self._database.write(work, size=len(packed))

    async def read(self, documents: Sequence[str]) -> dict[str, bytes]:
        """See `DocumentStore.read`."""
        oldest = time.time() - self._limits.max_age_s

        def work(connection: sqlite3.Connection) -> dict[str, bytes]:
            found: dict[str, bytes] = {}
            for chunk in in_chunks(documents):
                query = (
                    f"SELECT id, packed FROM documents WHERE kept >= ? AND id IN ({question_marks(chunk)})"
                )
                found.update(connection.execute(query, (oldest, *chunk)))
            return {name: unpack_document(packed) for name, packed in found.items()}

        return await self._database.read(work)

    async def delete(self, document: str) -> bool:
        """See `DocumentStore.delete`."""

        def work(connection: sqlite3.Connection) -> bool:
            query = "SELECT seq, size FROM documents WHERE id = ?"
            rows = connection.execute(query, (document,)).fetchall()
            _remove(connection, rows)
            return bool(rows)

        return await self._database.write(work)

    async def drop_old(self) -> None:
        """Drop what is too old."""
        oldest = time.time() - self._limits.max_age_s
        most = self._limits.document_bytes
        while await self._database.write(lambda connection: _drop(connection, most, oldest)) == STEP:
            pass


def _drop(connection: sqlite3.Connection, most: int, oldest: float) -> int:
    """Drop the oldest documents, at most STEP: those kept before `oldest`, and those beyond `most` bytes.

    Returns how many were dropped.
    """
    left = connection.execute("SELECT bytes FROM document_totals").fetchone()[0]
    dropped: list[tuple[int, int]] = []
    query = f"SELECT seq, size, kept FROM documents ORDER BY seq LIMIT {STEP}"
    for seq, size, kept in connection.execute(query):
        if kept >= oldest and left <= most:
            break
        dropped.append((seq, size))
        left -= size
    _remove(connection, dropped)
    return len(dropped)


def _remove(connection: sqlite3.Connection, documents: Sequence[tuple[int, int]]) -> None:
    """Remove documents, given by number and size."""
    connection.executemany("DELETE FROM documents WHERE seq = ?", [(seq,) for seq, _ in documents])
    size = sum(size for _, size in documents)
    connection.execute("UPDATE document_totals SET bytes = bytes - ?", (size,))
