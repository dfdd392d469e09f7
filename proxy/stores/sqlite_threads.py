"""SQLite in threads: one that writes, a few that read, one file for all processes.

All writes that wait when a transaction begins become part of it, so that many turns cost one commit. A write
returns only after its commit. A thread of its own copies the log (WAL) into the file, because that waits for
the disk. WAL with synchronous=NORMAL: a process that is killed loses nothing that was committed; a machine
that loses power may lose the last transactions, and the file stays intact.
"""

import asyncio
import os
import queue
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from proxy.history.store import StoreError

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]
"""What a thread does with its connection. A write may be run again after it was rolled back."""

BUSY_S = 5.0
"""How long a call waits for a lock that another process holds, in seconds."""
_GROUP = 256
"""Writes in one transaction."""
_CHECKPOINT_WRITES = 64
"""Writes after which the log is copied into the file."""
_LOG_PAGES = 16384
"""Pages in the log at which the writer copies them itself: the thread for that was too slow."""
_READERS = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    work: Work[Any]
    future: "asyncio.Future[Any]"
    deadline: float = field(default_factory=lambda: time.monotonic() + BUSY_S)
    """Until when it waits for the lock."""


_Outcome = tuple["asyncio.Future[Any]", Any, Exception | None]


class Database:
    """One file: `write` and `read` from an event loop, between `open` and `aclose`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._checkpoints = ThreadPoolExecutor(1, "store-checkpoint")
        self._checkpoint: Future[None] | None = None
        self._writes = 0
        """Since the last checkpoint."""
        self._idle: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()

    async def open(self, prepare: Work[None]) -> None:
        """Connect, let `prepare` create the tables, and start the threads.

        Raises:
            StoreError: the file cannot be opened, or `prepare` refuses it.
        """
        connection = await asyncio.to_thread(self._open, prepare)
        # daemon: a process that forgot `aclose` must be able to end
        self._writer = threading.Thread(
            target=self._serve, args=(connection,), name="store-write", daemon=True
        )
        self._writer.start()
        self._readers = ThreadPoolExecutor(_READERS, "store-read")

    async def aclose(self) -> None:
        """Finish the writes that wait, then close the file."""
        writer, readers = self._writer, self._readers
        self._writer = self._readers = None
        if writer is not None:
            self._jobs.put(None)
            await asyncio.to_thread(writer.join)
            await asyncio.to_thread(self._checkpoints.shutdown)
        if readers is not None:
            await asyncio.to_thread(readers.shutdown)
            while not self._idle.empty():
                self._idle.get().close()

    async def write(self, work: Work[T]) -> T:
        """Run `work` in a transaction that it may share with other writes; returns after the commit."""
        if self._writer is None:
            raise StoreError(f"{self._path} is not open")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.put(_Job(work, future))
        return await future

    async def read(self, work: Work[T]) -> T:
        """Run `work`, which changes nothing; all its queries see the same state."""
        if self._readers is None:
            raise StoreError(f"{self._path} is not open")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, work)

    def _open(self, prepare: Work[None]) -> sqlite3.Connection:
        with self._explained():
            self._create_file()
            connection = self._connect()
            deadline = time.monotonic() + BUSY_S
            try:
                # `_retry_while_locked` waits instead: SQLite sleeps up to 0.1 s at a time, and some starve
                connection.execute("PRAGMA busy_timeout = 0")
                _retry_while_locked(lambda: self._use_wal(connection), deadline)
                with transaction(connection, deadline):
                    prepare(connection)
                for _ in range(_READERS):
                    self._idle.put(self._connect())
            except BaseException:
                connection.close()
                raise
            return connection

    def _create_file(self) -> None:
        """Create the file and its folder for this user alone; what exists stays as it is.

        SQLite gives its other files, -wal and -shm, the mode of the first.
        """
        parents = self._path.parents
        for folder in reversed([folder for folder in parents if not folder.exists()]):
            folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileExistsError):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, BUSY_S, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA secure_delete = OFF")
        connection.execute("PRAGMA cache_size = -16384")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit = {64 * 2**20}")
        return connection

    def _use_wal(self, connection: sqlite3.Connection) -> None:
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise StoreError(f"{self._path}: its disk cannot share memory between processes; use a local one")

    def _read(self, work: Work[T]) -> T:
        connection = self._idle.get()
        try:
            with self._explained():
                connection.execute("BEGIN")
                try:
                    return work(connection)
                finally:
                    # some errors end the transaction by themselves
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
        finally:
            self._idle.put(connection)

    def _serve(self, connection: sqlite3.Connection) -> None:
        """Run in the writer's thread: commit the jobs in groups until a None arrives."""
        more = True
        while more:
            group = []
            job = self._jobs.get()
            while job is not None:
                group.append(job)
                if len(group) == _GROUP or self._jobs.empty():
                    break
                job = self._jobs.get()
            more = job is not None
            if group:
                self._commit(connection, group)
                self._checkpoint_if_due(len(group))
        connection.close()

    def _checkpoint_if_due(self, writes: int) -> None:
        self._writes += writes
        if self._writes >= _CHECKPOINT_WRITES and (self._checkpoint is None or self._checkpoint.done()):
            self._writes = 0
            self._checkpoint = self._checkpoints.submit(self._copy_log)

    def _copy_log(self) -> None:
        # if something is wrong with the file, the next write reports it
        with suppress(sqlite3.Error), closing(self._connect()) as connection:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def _commit(self, connection: sqlite3.Connection, group: Sequence[_Job]) -> None:
        """All in one transaction; if that fails, each in its own, so that one cannot spoil the others."""
        try:
            with self._explained(), transaction(connection, group[0].deadline):
                results = [job.work(connection) for job in group]
        except Exception as error:  # noqa: BLE001 - the boundary: whoever waits for it gets it
            if len(group) == 1 or isinstance(error.__cause__, sqlite3.OperationalError):
                _settle([(job.future, None, error) for job in group])
            else:
                for job in group:
                    self._commit(connection, [job])
        else:
            _settle([(job.future, result, None) for job, result in zip(group, results, strict=True)])

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors as StoreErrors that name the file and what to do."""
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"{self._path}: {error}: {_advice(error)}") from error
        except msgspec.DecodeError as error:
            raise StoreError(f"{self._path} holds what this version cannot read: {error}") from error
        except OSError as error:
            raise StoreError(
                f"{self._path}: cannot create the file or its folder: {error.strerror}: name another file"
            ) from error


@contextmanager
def transaction(connection: sqlite3.Connection, deadline: float) -> Iterator[None]:
    """Everything or nothing, with the lock from the start: nobody else writes in between.

    Args:
        deadline: until when to wait for the lock, in the time of `time.monotonic`.
    """
    _retry_while_locked(lambda: connection.execute("BEGIN IMMEDIATE"), deadline)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # some errors end the transaction by themselves
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _retry_while_locked(attempt: Callable[[], object], deadline: float) -> None:
    """Retry until nobody else holds the lock: not every step of SQLite respects its own timeout."""
    while True:
        try:
            attempt()
            return
        except sqlite3.OperationalError as error:
            if (
                _code(error) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
                or time.monotonic() > deadline
            ):
                raise
        time.sleep(random.uniform(0.0002, 0.002))


def _settle(outcomes: Sequence[_Outcome]) -> None:
    """Deliver results and errors, each in the event loop that waits for it."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].get_loop(), []).append(outcome)
    for loop, of_loop in by_loop.items():
        # nobody waits in a loop that was closed
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, of_loop)


def _resolve(outcomes: Sequence[_Outcome]) -> None:
    for future, result, error in outcomes:
        if future.done():
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _code(error: sqlite3.Error) -> int:
    """The primary result code; 0 for errors of the Python module itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _advice(error: sqlite3.Error) -> str:
    code = _code(error)
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return "the file is damaged or no SQLite database; move it away, or name another"
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        return "the file and its folder must be writable"
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return "look at the disk's free space and health"
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"another process held the write lock for {BUSY_S:g} s: end that process if it hangs"
    return "is this the file of another program?"
