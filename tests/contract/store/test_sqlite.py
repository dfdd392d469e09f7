"""What only SQLite has: files with modes, and locks."""

import asyncio
import os
import re
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.store_utils import add, digest_of, entry, make_turn, opened, usage
from tokenproxy.record.store import StoreError
from tokenproxy.store import sqlite_file


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "x.db"


@pytest.fixture
def url(database: Path) -> str:
    return f"sqlite://{database}"


def _modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}


async def test_only_its_user_may_read_a_store_unless_its_file_allows_more(database: Path, url: str) -> None:
    before = os.umask(0o022)  # it lets everybody read what is created
    try:
        for mode in (0o600, 0o660):
            async with opened(url) as store:
                await add(store, make_turn())
                expected = {"folder": 0o700, **dict.fromkeys(("x.db", "x.db-wal", "x.db-shm"), mode)}
                assert _modes(database.parent) == expected
            await asyncio.to_thread(database.chmod, 0o660)
    finally:
        os.umask(before)


async def test_a_write_waits_for_a_lock_of_another_program(
    database: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(url) as store:
        with closing(sqlite3.connect(database, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            waiting = asyncio.create_task(add(store, make_turn()))
            await asyncio.sleep(0.02)
            assert not waiting.done()
            other.execute("COMMIT")
            await waiting
            monkeypatch.setattr(sqlite_file, "BUSY_S", 0.05)
    async with opened(url) as store:
        with closing(sqlite3.connect(database, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            # also for a call that comes while the writer still waits for another's
            adding = (add(store, make_turn()) for _ in range(3))
            for error in await asyncio.gather(*adding, return_exceptions=True):
                assert isinstance(error, StoreError)
                assert re.search(rf"{database}: .*locked.*held the write lock for 0\.05 s", str(error))
            assert len(await store.turns("r")) == 1
        await add(store, make_turn())
        assert (await usage(store)).turns == 2


async def test_a_process_that_is_killed_loses_no_long_turn(url: str) -> None:
    program = """if True:
        import asyncio, os, sys
        from tests.support.store_utils import add, make_turn, opened
        async def main():
            async with opened(sys.argv[1]) as store:
                await add(store, make_turn(appended=os.urandom(100_000)))
                print((await store.turns("r"))[0].appended.hex(), flush=True)
                os.kill(os.getpid(), 9)
        asyncio.run(main())
    """
    command, folder = [sys.executable, "-c", program, url], Path(__file__).parents[3]
    killed = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, cwd=folder)
    assert killed.returncode == -9
    async with opened(url) as store:
        assert (await store.turns("r"))[0].appended.hex() == killed.stdout.strip()


async def test_a_turn_that_is_claimed_or_continued_is_not_written_again(database: Path, url: str) -> None:
    turn = make_turn(appended=os.urandom(400_000))
    async with opened(url) as store:
        await add(store, turn, entry("k", "ids"))
        log = database.with_name("x.db-wal")
        before = log.stat().st_size
        assert await store.claim(digest_of("k"), digest_of("ids")) == turn.id
        await store.release(turn.id)
        await add(store, make_turn(parent=turn.id))
        assert before > 400_000 > 4 * (log.stat().st_size - before)
