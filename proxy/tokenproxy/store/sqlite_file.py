"""The file of a SQLite store, also when somebody deletes or replaces it.

A connection keeps the file that it opened, even if the name is deleted or given to another file: what it
writes after that is lost. So each use compares the file of the connection with that of the name, and connects
again if they differ. This module also waits for locks, and explains errors.
"""

import errno
import logging
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from tokenproxy.base.files import locked_folder
from tokenproxy.record.store import RecordRefused, StoreError, StoreStalled, StoreUnusable
from tokenproxy.store.packed import text

log = logging.getLogger("tokenproxy")

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]
"""What a thread does with its connection. A write may be run again after it was rolled back."""
_Identity = tuple[int, int]
"""Device and inode of a file. No other file gets them while a connection holds this one open."""

BUSY_S = 5.0
"""How long a call waits for a lock that another process holds, in seconds."""
_PAGE_BYTES = 2048
"""Each index entry of a turn changes a page of its own. So smaller pages make the log shorter: a small turn
takes 7 KB less than with SQLite's usual 4096, and the same CPU time. With 1024 it takes hardly less, and more
time."""
_LOG_PAGES = 32 * 2**20 // _PAGE_BYTES
"""Pages in the log at which the writer copies them itself: the thread for that was too slow."""
LOG_BYTES = 16 * 2**20
"""Bytes to which the log's file is cut when it is written from its beginning again."""
_SIDE_FILES = ("-wal", "-shm")
_NO_FOLDER = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG)
"""Errors of a path that can never be that of a file."""
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_REFUSED = (sqlite3.DataError, sqlite3.IntegrityError)


class DatabaseFile:
    """A name, and the file with our tables that it points to. Safe across threads."""

    def __init__(self, path: Path, prepare: Work[None]) -> None:
        """`prepare` creates the tables where there are none."""
        self.path = path
        self._prepare = prepare
        self._lock = threading.Lock()
        self._ready: _Identity | None = None
        self._held: _Identity | None = None
        """The file of `_anchor`."""
        self._anchor: sqlite3.Connection | None = None
        """Does nothing but hold the file and its side files open, so that their inodes are not used again."""
        self._side_files: dict[Path, _Identity | None] = {}
        self._connections: dict[int, tuple[sqlite3.Connection, _Identity]] = {}
        """Of each thread, with the file that it opened."""

    @contextmanager
    def connection(self, *, waits: bool) -> Iterator[sqlite3.Connection]:
        """The connection of this thread, opened anew after errors and where the name points to another file.

        Args:
            waits: whether SQLite itself waits for locks.

        Raises:
            StoreError, sqlite3.Error, OSError: it cannot be opened or created, or `prepare` refuses it.
        """
        thread = threading.get_ident()
        connection, identity = self._connections.get(thread, (None, None))
        if connection is None or identity != _identity(self.path):
            self._disconnect(thread)
            identity, connection = self._ready_file(), self.connect()
            self._connections[thread] = connection, identity
            if not waits:
                connection.execute("PRAGMA busy_timeout = 0")
        try:
            yield connection
        except sqlite3.DatabaseError as error:
            if _code(error) not in _LOCKED and not isinstance(error, _REFUSED):
                # the file may be damaged, or without its tables: prepare it again before it is used next
                self._disconnect(thread)
                with self._lock:
                    self._ready = None
            raise

    def moved(self) -> bool:
        """Whether the name no longer points to the file of this thread's connection."""
        return self._connections[threading.get_ident()][1] != _identity(self.path)

    def _disconnect(self, thread: int) -> None:
        connection, _ = self._connections.pop(thread, (None, None))
        if connection is not None:
            connection.close()

    def _ready_file(self) -> _Identity:
        """Create the file and its tables where they are missing; returns the file."""
        with self._lock:
            found = _identity(self.path)
            if found is None or found != self._ready:
                if self._held not in (None, found):
                    change = "deleted" if found is None else "replaced"
                    log.error("%s was %s: what it held is not recognised any more", self.path, change)
                self._forget()
                self._create()
                self._anchor = self._prepared()
                side_files = [self.path.with_name(self.path.name + suffix) for suffix in _SIDE_FILES]
                self._side_files = {path: _identity(path) for path in side_files}
                self._ready = self._held = _identity(self.path)
                assert self._ready is not None  # the connection has just read it
            return self._ready

    def close(self) -> None:
        """Close all connections; no thread uses one any more."""
        for thread in list(self._connections):
            self._disconnect(thread)
        with self._lock:
            self._ready = None
            self._forget(remove=False)

    def connect(self) -> sqlite3.Connection:
        """A connection to a file that exists."""
        # mode=rw: a name that points to nothing must not become a file with default permissions
        name = f"{self.path.absolute().as_uri()}?mode=rw"
        connection = sqlite3.connect(name, BUSY_S, isolation_level=None, check_same_thread=False, uri=True)
        connection.text_factory = text
        try:
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA secure_delete = OFF")
            connection.execute("PRAGMA cache_size = -16384")
            connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
            connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
        except BaseException:  # whatever it was, the caller gets no connection to close
            connection.close()
            raise
        return connection

    def _prepared(self) -> sqlite3.Connection:
        connection = self.connect()
        deadline = time.monotonic() + BUSY_S
        try:
            # `_retry_while_locked` waits instead: SQLite sleeps up to 0.1 s at a time, and some starve
            connection.execute("PRAGMA busy_timeout = 0")
            # changes nothing in a file that has tables
            connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            _retry_while_locked(lambda: self._use_wal(connection), deadline)
            with transaction(connection, deadline):
                self._prepare(connection)
        except BaseException:  # whatever it was, the caller gets no connection to close
            connection.close()
            raise
        return connection

    def _forget(self, *, remove: bool = True) -> None:
        """Let go of the file that was; its side files must not be taken for those of the next one."""
        stale = [path for path, was in self._side_files.items() if was is not None and was == _identity(path)]
        if remove and _identity(self.path) != self._held and stale:
            with locked_folder(self.path.parent):
                for path in stale:
                    path.unlink(missing_ok=True)
        self._side_files, self._held = {}, None
        if self._anchor is not None:
            self._anchor.close()
            self._anchor = None

    def _create(self) -> None:
        """Create the file and its folder for this user alone; what exists stays as it is.

        SQLite gives its other files, -wal and -shm, the mode of the first.
        """
        if self.path.is_dir():
            raise StoreUnusable(f"{self.path} is a folder: name a file; it and its folder must be writable")
        parents = self.path.parents
        for folder in reversed([folder for folder in parents if not folder.exists()]):
            folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileExistsError):
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))

    def _use_wal(self, connection: sqlite3.Connection) -> None:
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise StoreUnusable(
                f"{self.path}: its disk cannot share memory between processes; use a local one"
            )


@contextmanager
def explained(place: object) -> Iterator[None]:
    """Errors as StoreErrors that name the database and what to do."""
    try:
        yield
    except sqlite3.Error as error:
        kind, advice = _explanation(error)
        raise kind(f"{place}: {error}: {advice}") from error
    except OSError as error:
        kind = StoreUnusable if error.errno in _NO_FOLDER else StoreError
        raise kind(
            f"{place}: cannot create the file or its folder: {error.strerror}: name another file"
        ) from error


@contextmanager
def transaction(connection: sqlite3.Connection, deadline: float) -> Iterator[None]:
    """All or nothing, with the lock from the start: no other process writes in between.

    Args:
        deadline: until when to wait for the lock, in the time of `time.monotonic`.
    """
    _retry_while_locked(lambda: connection.execute("BEGIN IMMEDIATE"), deadline)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # whatever the block raises, its transaction must not stay open; some errors end it by themselves
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _retry_while_locked(attempt: Callable[[], object], deadline: float) -> None:
    """Retry until no other process holds the lock: not every step of SQLite respects its own timeout."""
    while True:
        try:
            attempt()
            return
        except sqlite3.OperationalError as error:
            if _code(error) not in _LOCKED or time.monotonic() > deadline:
                raise
        time.sleep(random.uniform(0.0002, 0.002))


def _identity(path: Path) -> _Identity | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _code(error: sqlite3.Error) -> int:
    """The primary result code; 0 for errors of the Python module itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _explanation(error: sqlite3.Error) -> tuple[type[StoreError], str]:
    """The kind of an error, and what to do."""
    code = _code(error)
    if code in _LOCKED:
        held = f"another process held the write lock for {BUSY_S:g} s"
        return StoreStalled, f"{held}: end that process if it hangs"
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return StoreUnusable, "the file is damaged or no SQLite database; move it away, or name another"
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        return StoreError, "the file and its folder must be writable"
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return StoreError, "look at the disk's free space and health"
    return RecordRefused if isinstance(
        error, _REFUSED
    ) else StoreError, "is this the file of another program?"
