"""SQLite beside the event loop: one thread that writes, a few that read, one file for all processes.

Whatever waits to be written when a transaction begins goes into it, so that many turns cost one commit. A
write has returned only after its commit. What the log (WAL) holds is brought into the file by a thread of its
own, because that waits for the disk. WAL with synchronous=NORMAL: a process that is killed loses nothing
that was committed; a machine that loses power may lose the last moments, never the whole.
"""

import asyncio
import queue
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from proxy.history.store import StoreError

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]
"""What a thread does with its connection. A write may be run again after it was rolled back."""

BUSY_S = 30.0
"""How long to wait for the lock that another process holds."""
_GROUP = 256
_CHECKPOINT_WRITES = 64
_LOG_PAGES = 16384
"""Pages in the log that make the writer itself wait for the disk: the others' work was not enough."""
_READERS = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    work: Work[Any]
    future: "asyncio.Future[Any]"


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
        self._unchecked = 0
        self._idle: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()

    async def open(self, prepare: Work[None]) -> None:
        """Connect, let `prepare` make the tables, and start the threads.

        Raises:
            StoreError: the file cannot be opened, or `prepare` does not like it.
        """
        connection = await asyncio.to_thread(self._open, prepare)
        # daemon: a process that forgot `aclose` must be able to end
        self._writer = threading.Thread(
            target=self._serve, args=(connection,), name="store-write", daemon=True
        )
        self._writer.start()
        self._readers = ThreadPoolExecutor(_READERS, "store-read")

    async def aclose(self) -> None:
        """Write what waits, then close the file."""
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
        """Do `work` in a transaction, with others; returns after the commit."""
        if self._writer is None:
            raise StoreError(f"{self._path} is not open")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.put(_Job(work, future))
        return await future

    async def read(self, work: Work[T]) -> T:
        """Do `work`, which changes nothing."""
        if self._readers is None:
            raise StoreError(f"{self._path} is not open")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, work)

    def _open(self, prepare: Work[None]) -> sqlite3.Connection:
        with self._explained():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            connection = self._connect()
            try:
                _patiently(lambda: self._use_wal(connection))
                with transaction(connection):
                    prepare(connection)
                for _ in range(_READERS):
                    self._idle.put(self._connect())
                # `transaction` waits instead: SQLite sleeps up to 0.1 s at a time, and the unlucky starve
                connection.execute("PRAGMA busy_timeout = 0")
            except BaseException:
                connection.close()
                raise
            return connection

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
                return work(connection)
        finally:
            self._idle.put(connection)

    def _serve(self, connection: sqlite3.Connection) -> None:
        """The writer's thread, until a None."""
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
                self._check(len(group))
        connection.close()

    def _check(self, writes: int) -> None:
        self._unchecked += writes
        if self._unchecked >= _CHECKPOINT_WRITES and (self._checkpoint is None or self._checkpoint.done()):
            self._unchecked = 0
            self._checkpoint = self._checkpoints.submit(self._empty_log)

    def _empty_log(self) -> None:
        # what is wrong with the file, the next write says to somebody
        with suppress(sqlite3.Error), closing(self._connect()) as connection:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def _commit(self, connection: sqlite3.Connection, group: Sequence[_Job]) -> None:
        """All in one transaction; if that fails, each in its own, so that one cannot spoil the others."""
        try:
            with self._explained(), transaction(connection):
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
            raise StoreError(f"{self._path}: cannot make its folder: {error.strerror}") from error


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Everything or nothing, with the lock from the start: nobody else writes in between."""
    _patiently(lambda: connection.execute("BEGIN IMMEDIATE"))
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # some errors end the transaction by themselves
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _patiently(attempt: Callable[[], object]) -> None:
    """Try until nobody else holds the lock: not every step of SQLite heeds its own timeout."""
    deadline = time.monotonic() + BUSY_S
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
    """Tell those who wait, each in its own event loop."""
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
        return f"another process held its lock for {BUSY_S:.0f} s"
    return "is the file another program's?"
