"""What only SQLite has: files with modes, and locks."""

import asyncio
import os
import re
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from proxy.history.store import SECRET_BYTES, Cursor, StoreError
from proxy.stores import sqlite_file
from proxy.stores.sqlite import sessions_query
from proxy.stores.sqlite_feed import IDLE_SESSIONS
from tests.support.store_utils import add, digest_of, entry, make_session, make_turn, opened


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """The usual one lets everybody read what is created."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """The write lock, held by somebody else."""
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


async def test_only_its_user_may_read_a_store(tmp_path: Path) -> None:
    file = tmp_path / "made/by/store/x.db"
    async with opened(f"sqlite://{file}") as store:
        await add(store, make_turn())
        assert {path.name: _mode(path) for path in file.parent.iterdir()} == {
            "x.db": 0o600,
            "x.db-wal": 0o600,
            "x.db-shm": 0o600,
        }
    assert {_mode(folder) for folder in list(file.parents)[:3]} == {0o700}
    assert _mode(file) == 0o600


async def test_a_file_that_lacks_later_tables(tmp_path: Path) -> None:
    file = tmp_path / "x.db"
    turn = make_turn()
    async with opened(f"sqlite://{file}") as store:
        await add(store, turn)
    with closing(sqlite3.connect(file)) as connection:
        for table in ("replica_changes", "clock", "secret", "feed", "feed_state", "consumers"):
            connection.execute(f"DROP TABLE {table}")
        connection.execute("DROP TABLE documents")
        connection.execute("DROP TABLE document_totals")
    async with opened(f"sqlite://{file}") as store:
        assert await store.path(turn.id) == [turn]
        await store.change_replica("fleet", "http://a:1", "removed")
        assert await store.replica_changes("fleet") == {"http://a:1": "removed"}
        assert len(await store.secret()) == SECRET_BYTES
        assert await store.feed.finish_idle(time.time() + 60, 9) == 1
        assert [found.session.turns for found in await store.feed.read(0, limit=9)] == [1]
        assert await store.feed.acknowledge("", "c", 0) == 0
        await store.documents.keep("d", b"{}")
        assert await store.documents.read(["d"]) == {"d": b"{}"}


async def test_modes_of_existing_files_and_folders_stay(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o755)
    file = folder / "x.db"
    async with opened(f"sqlite://{file}"):
        pass
    assert (_mode(folder), _mode(file)) == (0o755, 0o600)
    file.chmod(0o660)
    async with opened(f"sqlite://{file}") as store:
        await add(store, make_turn())
        assert _mode(folder / "x.db-wal") == 0o660
    assert (_mode(folder), _mode(file)) == (0o755, 0o660)


async def test_a_lock_that_is_never_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "BUSY_S", 0.05)
    file = tmp_path / "x.db"
    held = rf"{file}: .*locked.*held the write lock for 0\.05 s"
    async with opened(f"sqlite://{file}") as store:
        await add(store, make_turn(), entry("k"))
        with _locked(file):
            # also for a call that comes while the writer still waits for another's
            failed = await asyncio.gather(
                *(add(store, make_turn()) for _ in range(3)), return_exceptions=True
            )
            for error in failed:
                assert isinstance(error, StoreError) and re.search(held, str(error))
            assert (await store.find([digest_of("k")]))[digest_of("k")].total == 1
            with pytest.raises(StoreError, match="held the write lock"):
                async with opened(f"sqlite://{file}"):
                    pass
        await add(store, make_turn())
        assert (await store.usage()).turns == 2


async def test_a_lock_that_is_released_in_time(tmp_path: Path) -> None:
    file = tmp_path / "x.db"
    async with opened(f"sqlite://{file}") as store:
        with _locked(file):
            task = asyncio.create_task(add(store, make_turn()))
            await asyncio.sleep(0.02)
            assert not task.done()
        await task


async def test_sessions_and_idle_rollouts_are_read_from_an_index(tmp_path: Path) -> None:
    file = tmp_path / "x.db"
    async with opened(f"sqlite://{file}") as store:
        await store.save_session(make_session())
    with closing(sqlite3.connect(file)) as connection:
        for tenant, index in ((None, "sessions_by_use"), ("t", "sessions_of_tenant_by_use")):
            for before in (None, Cursor(1.0, "r")):
                query, values = sessions_query(10, tenant, before)
                plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}", values)]
                assert plan[0].startswith(f"SEARCH sessions USING INDEX {index} (")
                assert not any("TEMP B-TREE" in step for step in plan)
        [step] = connection.execute(f"EXPLAIN QUERY PLAN {IDLE_SESSIONS}", (0, "", 1, 9)).fetchall()
        assert "SEARCH sessions USING COVERING INDEX sessions_by_use" in step[3]
