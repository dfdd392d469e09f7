"""SQLite in threads: one that writes, a few that read, one file for all processes.

All writes that wait when a transaction starts become part of it, so that many turns cost one commit. A write
returns only after its commit. A thread of its own copies the log (WAL) into the file, because that waits for
the disk. WAL with synchronous=NORMAL: a process that is killed loses nothing that was committed; a machine
that loses power may lose the last transactions, and the file stays intact.
"""

import asyncio
import queue
import sqlite3
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tokenproxy.record.store import StoreError
from tokenproxy.store import sqlite_file
from tokenproxy.store.sqlite_file import DatabaseFile, Work, explained, transaction

T = TypeVar("T")

_GROUP = 256
"""Writes in one transaction."""
_CHECKPOINT_BYTES = 16 * 2**20
"""Bytes in the log, roughly, after which it is copied into the file. A page that many turns change is in the
log many times, and is copied once."""
_WRITE_BYTES = 8192
"""What a write of few bytes adds to the log, roughly: the pages of its index entries."""
_READERS = 2
_REPLACED_AT_MOST = 3
"""Files that one group of writes goes to, if each is deleted meanwhile."""
_CLOSE_S = 10.0
"""How long `aclose` waits for a thread that hangs in the disk."""


class _Job(NamedTuple):
    work: Work[Any]
    future: "asyncio.Future[Any]"
    size: int
    deadline: float
    """Until when it waits for the lock."""


class MemoryDatabase:
    """A database in this process, gone when it ends. Calls run at once, in the thread of the event loop."""

    def __init__(self, prepare: Work[None]) -> None:
        """`prepare` creates the tables."""
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        weakref.finalize(self, self._connection.close)
        prepare(self._connection)

    async def open(self) -> None:
        """Nothing: the tables are there."""

    async def aclose(self) -> None:
        """Nothing: the data stay as long as this object."""

    async def write(self, work: Work[T], size: int = 0) -> T:
        """The result of `work`, run in a transaction."""
        with explained("memory:"), transaction(self._connection, 0.0):
            return work(self._connection)

    async def read(self, work: Work[T]) -> T:
        """The result of `work`, which changes nothing."""
        with explained("memory:"):
            return work(self._connection)


class Database:
    """One file: `write` and `read` from an event loop, between `open` and `aclose`."""

    def __init__(self, path: Path, prepare: Work[None]) -> None:
        """`prepare` creates the tables where there are none."""
        self._path = path
        self._file = DatabaseFile(path, prepare)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._checkpoints = ThreadPoolExecutor(1, "store-checkpoint")
        self._checkpoint: Future[None] | None = None
        self._logged = 0
        """Bytes in the log since the last checkpoint, roughly."""

    async def open(self) -> None:
        """Connect, create the tables where there are none, and start the threads.

        Raises:
            StoreError: the file cannot be opened, or `prepare` refuses it.
        """
        readers = ThreadPoolExecutor(_READERS, "store-read")
        try:
            await asyncio.get_running_loop().run_in_executor(readers, self._read, lambda _: None)
        except BaseException:  # whatever it was, nobody else closes the file
            readers.shutdown(wait=False)
            self._file.close()
            raise
        self._readers = readers
        # daemon: a process that forgot `aclose` must be able to end
        self._writer = threading.Thread(target=self._serve, name="store-write", daemon=True)
        self._writer.start()

    async def aclose(self) -> None:
        """Finish the writes that wait, then close the file."""
        writer, readers = self._writer, self._readers
        self._writer = self._readers = None
        if writer is not None:
            self._jobs.put(None)
            await asyncio.to_thread(writer.join, _CLOSE_S)
            await asyncio.to_thread(self._checkpoints.shutdown)
        if readers is not None:
            await asyncio.to_thread(readers.shutdown)
        await asyncio.to_thread(self._file.close)

    async def write(self, work: Work[T], size: int = 0) -> T:
        """Run `work` in a transaction that it may share with other writes; returns after the commit.

        Args:
            size: bytes that it writes, where they are many.
        """
        if self._writer is None:
            raise StoreError(f"{self._path} is not open")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.put(_Job(work, future, size, time.monotonic() + sqlite_file.BUSY_S))
        return await future

    async def read(self, work: Work[T]) -> T:
        """Run `work`, which changes nothing; all its queries see the same state."""
        if self._readers is None:
            raise StoreError(f"{self._path} is not open")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, work)

    def _read(self, work: Work[T]) -> T:
        with explained(self._path), self._file.connection(waits=True) as connection:
            connection.execute("BEGIN")
            try:
                return work(connection)
            finally:
                # some errors end the transaction by themselves
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def _serve(self) -> None:
        """Run in the writer's thread: commit the jobs in groups until a None arrives."""
        more = True
        while more:
            group = []
            job = self._jobs.get()
            while job is not None:
                # its caller has left
                if not job.future.cancelled():
                    group.append(job)
                if len(group) == _GROUP or self._jobs.empty():
                    break
                job = self._jobs.get()
            more = job is not None
            if group:
                self._commit(group)
                self._logged += sum([job.size + _WRITE_BYTES for job in group])
            if self._logged >= _CHECKPOINT_BYTES and (self._checkpoint is None or self._checkpoint.done()):
                self._logged = 0
                self._checkpoint = self._checkpoints.submit(self._copy_log)

    def _commit(self, group: Sequence[_Job]) -> None:
        """All in one transaction; if that fails, each in its own, so that one cannot spoil the others."""
        try:
            with explained(self._path):
                outcomes = self._run(group)
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: the futures get it
            if len(group) > 1 and not isinstance(error.__cause__, sqlite3.OperationalError):
                for job in group:
                    self._commit([job])
                return
            outcomes = [error] * len(group)
        # a loop that was closed has no callers left
        with suppress(RuntimeError):
            group[0].future.get_loop().call_soon_threadsafe(_settle, group, outcomes)

    def _run(self, group: Sequence[_Job]) -> list[Any]:
        """Run jobs in one transaction, in the file that has the name after the commit."""
        for _ in range(_REPLACED_AT_MOST):
            with self._file.connection(waits=False) as connection:
                with transaction(connection, group[0].deadline):
                    results = [job.work(connection) for job in group]
                if not self._file.moved():
                    return results
        raise StoreError("the file of the store is deleted again and again")

    def _copy_log(self) -> None:
        # if something is wrong with the file, the next write reports it
        with suppress(sqlite3.Error), closing(self._file.connect()) as connection:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


def _settle(group: Sequence[_Job], outcomes: Sequence[Any]) -> None:
    """Deliver results and errors to the callers. Runs in their event loop."""
    for job, outcome in zip(group, outcomes, strict=True):
        if job.future.done():
            continue
        if isinstance(outcome, Exception):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome)
