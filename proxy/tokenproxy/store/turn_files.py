"""Long turns of a SQLite store: each in a file of its own, in a folder next to the database.

SQLite writes every byte twice, to its log and later to its file. A file here is written once.

- A file is written in the transaction that adds its turn, and deleted after the one that removes the turn. A
  process that is killed in between leaves a file without a turn, which `delete_unused` finds.
- A turn whose file is missing or incomplete counts as not recorded: another process has just evicted it, or
  the machine lost power before the file was on the disk.
"""

import os
import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tokenproxy.record.turn import new_id

FILES_SCHEMA = """
CREATE INDEX turns_in_files ON turns (file) WHERE file IS NOT NULL;
CREATE TABLE file_prefix (prefix TEXT NOT NULL);
INSERT INTO file_prefix VALUES (lower(hex(randomblob(8))));
"""
"""A database deletes only files with its own prefix: those of one that was moved away stay."""
_FILE_FROM_BYTES = 16_384
"""Bytes of a packed turn from which it gets a file. To create and delete one takes as long as to write
16 KB to log and database."""


class TurnFiles:
    """The files of one database. Safe across threads."""

    def __init__(self, database: Path | None) -> None:
        """`database`: None for one in memory, whose turns have no files."""
        self._named = database

    @property
    def _database(self) -> Path:
        """Where the database really is: processes that name it by different links share the files too."""
        assert self._named is not None  # turns in memory have no files
        return self._named.resolve()

    @property
    def _folder(self) -> Path:
        database = self._database
        return database.with_name(f"{database.name}-turns")

    def new_name(self, connection: sqlite3.Connection, packed: bytes) -> str | None:
        """Name for the file of a packed turn; None if the turn stays in the database."""
        in_file = self._named is not None and len(packed) >= _FILE_FROM_BYTES
        return f"{_prefix(connection)}-{new_id()}" if in_file else None

    def write(self, name: str, packed: bytes) -> None:
        """Write a file, with the mode of the database. Raises OSError."""
        mode = self._database.stat().st_mode & 0o666
        try:
            self._write(name, packed, mode)
        except FileNotFoundError:
            self._folder.mkdir(exist_ok=True)
            # who may read or write files may do so with the folder
            self._folder.chmod(mode | (mode & 0o444) >> 2)
            self._write(name, packed, mode)

    def read(self, name: str) -> bytes | None:
        """What a file holds; None if there is no such file."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def delete(self, names: Iterable[str]) -> None:
        """Delete files. Those that cannot be deleted stay until `delete_unused` finds them."""
        for name in names:
            with suppress(OSError):
                (self._folder / name).unlink()

    def delete_unused(self, connection: sqlite3.Connection) -> None:
        """Delete the files without turns. In a transaction that writes: no process adds files meanwhile."""
        if self._named is None or not self._folder.is_dir():
            return
        prefix = _prefix(connection)
        present = {path.name for path in self._folder.glob(f"{prefix}-*")}
        used = connection.execute("SELECT file FROM turns WHERE file IS NOT NULL") if present else ()
        self.delete(present.difference(row[0] for row in used))

    def _write(self, name: str, packed: bytes, mode: int) -> None:
        # created with its mode, so that other users cannot read it for a moment
        descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, mode)
                file.write(packed)
        except BaseException:
            # whatever interrupts the write, the part that was written would only fill the disk
            self.delete([name])
            raise


def _prefix(connection: sqlite3.Connection) -> str:
    prefix: str = connection.execute("SELECT prefix FROM file_prefix").fetchone()[0]
    return prefix
