"""Long turns of SQLite, which are in files next to the database."""

import asyncio
import errno
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from proxy.history.store import Evicted, Limits, Store, StoreError
from proxy.history.turn import Turn
from tests.support.store_utils import add, entry, make_turn, opened

_LONG = os.urandom(100_000)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """The file of a store."""
    return tmp_path / "x.db"


@pytest.fixture
def url(database: Path) -> str:
    """The URL of a store."""
    return f"sqlite://{database}"


def _files(database: Path) -> list[Path]:
    return sorted(database.with_name("x.db-turns").glob("*"))


def _size(path: Path) -> int:
    return path.stat().st_size


def _create(path: Path, mode: int) -> None:
    path.touch()
    path.chmod(mode)


def _move(source: Path, target: Path) -> None:
    source.rename(target)


def _run(program: str, url: str) -> subprocess.CompletedProcess[str]:
    folder = Path(__file__).parents[3]
    return subprocess.run([sys.executable, "-c", program, url], capture_output=True, text=True, cwd=folder)


async def _add_family(store: Store) -> Sequence[Turn]:
    """Add a long turn, and a short one that continues it."""
    long = make_turn(appended=_LONG)
    short = make_turn(parent=long.id)
    await add(store, long)
    await add(store, short)
    return long, short


async def test_only_long_turns_have_files(database: Path, url: str) -> None:
    async with opened(url) as store:
        long, short = await _add_family(store)
        assert len(_files(database)) == 1
        await add(store, long)  # again: it has one file all the same
        assert len(_files(database)) == 1
    async with opened(url) as store:
        assert await store.path(short.id) == await store.turns("r") == [long, short]


async def test_the_size_of_a_store_includes_files(database: Path, url: str) -> None:
    async with opened(url) as store:
        await add(store, make_turn(appended=_LONG))
        await add(store, make_turn(appended=_LONG))
        usage = await store.usage()
        assert usage.size == sum(map(_size, _files(database)))
    assert _size(database) < len(_LONG)


@pytest.mark.parametrize(("mode", "folder"), [(0o600, 0o700), (0o660, 0o770), (0o644, 0o755)])
async def test_files_have_the_mode_of_the_database(database: Path, url: str, mode: int, folder: int) -> None:
    _create(database, mode)
    async with opened(url) as store:
        await add(store, make_turn(appended=_LONG))
    (file,) = _files(database)
    assert stat.S_IMODE(file.stat().st_mode) == mode
    assert stat.S_IMODE(file.parent.stat().st_mode) == folder


async def test_files_are_deleted_with_their_turns(database: Path, url: str) -> None:
    async with opened(url, Limits(max_age_s=1000.0)) as store:
        await add(store, make_turn("deleted", appended=_LONG))
        await store.delete("deleted")
        assert _files(database) == []
        await add(store, make_turn("deleted", appended=_LONG))  # it may come again
        assert len(await store.turns("deleted")) == len(_files(database)) == 1
        await store.delete("deleted")
    async with opened(url, Limits(max_bytes=350_000)) as store:
        for rollout in "abcdefgh":
            await add(store, make_turn(rollout, appended=_LONG))
        left = await store.sessions(limit=10)
        assert 1 < len(left) == len(_files(database)) < 8


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:65_536])


def _make_unreadable(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda file: file.write_bytes(bytes(100_000)), _cut, _make_unreadable]
)
async def test_a_turn_whose_file_is_lost_is_ignored(
    database: Path, url: str, damage: Callable[[Path], object]
) -> None:
    async with opened(url) as store:
        _, short = await _add_family(store)
        damage(_files(database)[0])
        assert await store.path(short.id) == []
        assert await store.turns("r") == [short]


async def test_files_without_turns_are_deleted_at_the_next_start(database: Path, url: str) -> None:
    turn = make_turn(appended=_LONG)
    async with opened(url) as store:
        await add(store, turn)
    (file,) = _files(database)
    left_over = file.with_name(f"{file.name[:17]}left-over")
    foreign = file.with_name("0-of-another-database")
    for path in (left_over, foreign):
        path.write_bytes(b"")
    async with opened(url) as store:
        assert await store.turns("r") == [turn]
        assert _files(database) == sorted([foreign, file])


async def test_a_database_that_was_moved_away_keeps_its_files(database: Path, url: str) -> None:
    turn, other = make_turn(appended=_LONG), make_turn(appended=_LONG)
    away = database.with_name("away.db")
    async with opened(url) as store:
        await add(store, turn)
    _move(database, away)
    for _ in range(2):
        async with opened(url) as store:
            await add(store, other)
            assert await store.turns("r") == [other]
    _move(away, database)
    async with opened(url) as store:
        assert await store.turns("r") == [turn]


async def test_a_transaction_that_fails_leaves_no_file(database: Path, url: str) -> None:
    turn, other = make_turn(appended=_LONG), make_turn("other", appended=_LONG)
    async with opened(url) as store:
        with closing(sqlite3.connect(database)) as connection:
            fails = "SELECT RAISE(FAIL, 'the disk is full')"
            connection.execute(f"CREATE TRIGGER t BEFORE INSERT ON entries BEGIN {fails}; END")
        adding = [add(store, turn, entry("1")), add(store, other)]
        failure, added = await asyncio.gather(*adding, return_exceptions=True)
        assert isinstance(failure, StoreError) and added == Evicted()
        assert await store.turns("r") == []
        assert await store.turns("other") == [other]
        assert len(_files(database)) == 1


async def test_a_full_disk(database: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, mode: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    turn = make_turn(appended=_LONG)
    async with opened(url) as store:
        with monkeypatch.context() as patch, pytest.raises(StoreError, match="No space left"):
            patch.setattr(os, "fchmod", full)
            await add(store, turn)
        assert _files(database) == []
        await add(store, turn)
        assert await store.turns("r") == [turn]


async def test_a_process_that_is_killed_loses_no_long_turn(database: Path, url: str) -> None:
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
    killed = _run(program, url)
    assert killed.returncode == -9
    async with opened(url) as store:
        (turn,) = await store.turns("r")
        assert turn.appended.hex() == killed.stdout.strip()
        assert len(_files(database)) == 1


async def test_a_database_with_several_names_has_one_folder(database: Path, url: str, tmp_path: Path) -> None:
    link = tmp_path / "other" / "link.db"
    link.parent.mkdir()
    async with opened(url) as store:
        long, short = await _add_family(store)
        link.symlink_to(database)
        async with opened(f"sqlite://{link}") as other:
            assert await other.path(short.id) == [long, short]
            assert await other.delete("r")
    assert _files(database) == []
    assert sorted(path.name for path in link.parent.iterdir()) == ["link.db"]


async def test_a_transaction_that_fails_after_its_caller_left_leaves_no_file(
    database: Path, url: str
) -> None:
    async with opened(url) as store:
        await add(store, make_turn("other"))
        with closing(sqlite3.connect(database)) as blocker:
            blocker.execute(
                "CREATE TRIGGER refuse BEFORE UPDATE ON totals BEGIN SELECT raise(ABORT, 'refused'); END"
            )
            blocker.execute("BEGIN IMMEDIATE")
            adding = asyncio.ensure_future(add(store, make_turn(appended=_LONG)))
            await asyncio.sleep(0.02)
            adding.cancel()
            blocker.commit()
        with pytest.raises(asyncio.CancelledError):
            await adding
        assert not await store.claim("none")  # a write after it
        assert _files(database) == []
