"""What errors of stores say, and what they leave intact."""

import asyncio
import math
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import cast

import msgspec
import pytest
import redis
from msgspec.structs import replace

from tests.support.ports import held_port
from tests.support.redis_server import run_redis
from tests.support.store_utils import add, digest_of, entry, make_turn, opened, usage
from tokenproxy.fleet.weight_state import SharedError
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record import feed
from tokenproxy.record.store import Limits, RecordRefused, Store, StoreError
from tokenproxy.record.turn import TellingTurn
from tokenproxy.record.vocabulary import Cause
from tokenproxy.samples.feed import FeedFilter, read_step
from tokenproxy.samples.turn_json import traces_of
from tokenproxy.store.fleet_words import StoredWords
from tokenproxy.store.guarded import GuardedStore
from tokenproxy.store.redis import RedisStore
from tokenproxy.store.sqlite import SqliteStore
from tokenproxy.store.sqlite_tables import SCHEMA_VERSION
from tokenproxy.store.urls import STORE_URLS, make_store


@pytest.mark.parametrize(
    "url, kind",
    [
        ("memory:", SqliteStore),
        ("sqlite:x/y.db", SqliteStore),
        ("redis://user:word@localhost:6379/1?socket_timeout=3", RedisStore),
        ("rediss+cluster://user:word@a:1,b:2,[::1]:3/0?socket_timeout=3", RedisStore),
        ("valkey+cluster://:word%40%2f@a:1/", RedisStore),
        ("rediss+sentinel://user:word@a:1,b/name/3?sentinel_password=x", RedisStore),
    ],
)
def test_urls(url: str, kind: type[Store]) -> None:
    assert isinstance(make_store(url, Limits()), kind)


@pytest.mark.parametrize(
    "url, file",
    [
        ("sqlite:///a/b.db", Path("/a/b.db")),
        ("sqlite:////a/b.db", Path("/a/b.db")),
        ("sqlite:///~/b.db", Path.home() / "b.db"),
    ],
)
def test_paths(url: str, file: Path) -> None:
    assert make_store(url, Limits()).file == file  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "url", ["", "memory:x", "sqlite:///", "sqlite://host/x.db", "mysql://u:secret@host/db"]
)
def test_unknown_urls(url: str) -> None:
    with pytest.raises(ValueError, match="no store has a URL like") as raised:
        make_store(url, Limits())
    assert all(form in str(raised.value) for form in STORE_URLS)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "rest",
    [
        "://:secret/x@host:1/0",
        "://:secret@host/0?nonsense=1",
        "://:secret@a:1,b:2/0",
        "+cluster://:secret@host/1",
        "+cluster://:secret@a:1,b:x",
        "+sentinel://:secret@host",
        "+sentinel://:secret@host/name/x",
    ],
)
def test_wrong_redis_urls(rest: str) -> None:
    with pytest.raises(ValueError, match="not a Redis URL") as raised:
        make_store(f"redis{rest}", Limits())
    assert "secret" not in str(raised.value) and raised.value.__cause__ is None


async def _refused(url: str, *words: str) -> None:
    store = make_store(url, Limits())
    with pytest.raises(StoreError) as raised:
        await store.open()
    await store.aclose()
    for word in words:
        assert word in str(raised.value)
    assert "secret" not in str(raised.value)


async def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    file = tmp_path / "x.db"
    file.write_bytes(b"nothing like that" * 1000)
    await _refused(f"sqlite://{file}", str(file), "move it away")
    await _refused(f"sqlite://{file}/x.db", str(file), "folder")
    await _refused(f"sqlite://{tmp_path}", str(tmp_path), "must be writable")


async def test_a_file_of_another_version_or_program(tmp_path: Path) -> None:
    file, theirs = tmp_path / "x.db", tmp_path / "theirs.db"
    async with opened(f"sqlite://{file}"):
        pass
    async with opened(f"sqlite://{file}") as store:  # its own tables are those that it needs
        await add(store, make_turn())
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("ALTER TABLE sessions DROP COLUMN cause")
    await _refused(f"sqlite://{file}", str(file), "other columns", "move the file away")
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA user_version = 77")
    needed = f"version {SCHEMA_VERSION}"
    await _refused(f"sqlite://{file}", str(file), "version 77 ", needed, "move the file away")
    with closing(sqlite3.connect(theirs)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
        await _refused(f"sqlite://{theirs}", str(theirs), "another program's")
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]


_DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "another type": lambda packed: b"\xc1" + packed[1:],
    "cut": lambda packed: packed[:-9],
    "no text": lambda packed: packed.replace(b"tiny", b"tin\xff"),
    "another turn": lambda packed: packed.replace(b"0000", b"0001"),
    "a frame": lambda packed: b"\x28\xb5\x2f\xfd" + packed,
    "ids of three bytes": lambda packed: msgspec.msgpack.encode(
        replace(msgspec.msgpack.decode(packed, type=TellingTurn), sampling_mask=(b"abc", b""))
    ),
}


def _damage(url: str, turn: str, damage: Callable[[bytes], bytes]) -> None:
    """Damage a turn of the rollout `a`, and the rewards of the rollout `c`."""
    if url.startswith("redis"):
        with redis.Redis.from_url(url) as client:
            key = "tokenproxy:{s/a}:turns"
            client.hset(key, turn, damage(client.hget(key, turn)))
            client.hset("tokenproxy:{sessions}:rollout:c", "reward:", "x")
        return
    with closing(sqlite3.connect(url.removeprefix("sqlite://"))) as connection, connection:
        connection.create_function("damage", 1, damage)
        connection.execute("UPDATE turns SET packed = damage(packed) WHERE id = ?", (turn,))
        connection.execute("UPDATE sessions SET rewards = x'c1' WHERE id = 'c'")


@pytest.mark.parametrize("damage", _DAMAGES.values(), ids=_DAMAGES.keys())
async def test_all_but_damaged_records_is_served(shared_url: str, damage: Callable[[bytes], bytes]) -> None:
    guarded = GuardedStore(make_store(shared_url, Limits()), Metrics())
    store = cast(Store, guarded)
    await store.open()
    turns = {rollout: make_turn(rollout) for rollout in ("a", "b", "c")}
    follow_up = make_turn("a", parent=turns["a"].id)
    for turn in (*turns.values(), follow_up):
        await add(store, turn, entry(turn.rollout))
        await store.finish(turn.rollout, Cause.REWARD, {"": 1.0})
    _damage(shared_url, turns["a"].id, damage)
    for _ in range(4):  # more than the failures in a row after which a store is not asked
        assert await store.turns("a") == [follow_up] and await store.path(follow_up.id) == []
        assert await store.path(turns["b"].id) == await store.turns("b") == [turns["b"]]
        assert [each.id for each in await store.sessions(limit=2)] == ["a", "b"]
        assert await store.session("c") is None
    step = await read_step(store, 0, 9, FeedFilter())
    assert [(each.session.id, each.refused[0].reason) for each in step.rollouts] == [
        ("b", "prompt_length_mismatch"),
        ("a", "missing_parent"),
    ]
    assert traces_of(await store.turns("a"), "a") == []
    health = guarded.health()
    assert (health.state, health.unreadable, health.unreadable_turns) == ("ok", 2, [turns["a"].id])
    await store.finish("c", Cause.REWARD, {"": 2.0})
    assert (await store.feed(0, limit=9)).sessions[-1].rewards == {"": 2.0}
    await store.aclose()


_OF_SESSIONS: dict[str, tuple[str, bytes]] = {
    "no text": ("cause", b"\xff"),
    "a tenant that is no text": ("tenant", b"\xff"),
    "a position that is text": ("position", b"qq"),
    "a position beyond all": ("position", b"9223372036854775807"),
    "a time that never comes": ("used", b"inf"),
    "a number that is text": ("turns", b"x"),
    "a size beyond all": ("size", b"9223372036854775807"),
}
_OF_VALUES = {"no value": b"zjunk", "no consumer": b"=\xff", "nothing": b"", "another time": b"=\x92\x01\xc0"}


def _change(url: str, session: Mapping[str, bytes], values: Mapping[tuple[str, str], bytes]) -> None:
    """Set columns of the session `b`, and values by their space and name, to other bytes."""
    if url.startswith("redis"):
        with redis.Redis.from_url(url) as client:
            for field, value in session.items():
                client.hset("tokenproxy:{sessions}:rollout:b", field, value)
                if field == "used":
                    client.zadd("tokenproxy:{sessions}:used", {"b": math.inf})
            for (space, name), value in values.items():
                client.hset(f"tokenproxy:{{v/{space}}}:values", name, value)
                client.zadd(f"tokenproxy:{{v/{space}}}:expiry", {name: math.inf})
        return
    with closing(sqlite3.connect(url.removeprefix("sqlite://"))) as connection, connection:
        for field, value in session.items():
            number = "9e999" if value == b"inf" else "CAST(? AS TEXT)"
            query = f"UPDATE sessions SET {field} = {number} WHERE id = 'b'"
            connection.execute(query, () if value == b"inf" else (value,))
        for (space, name), value in values.items():
            connection.execute("DELETE FROM kept WHERE space = ? AND name = ?", (space, name))
            connection.execute("INSERT INTO kept VALUES (?, ?, 9e999, ?)", (space, name, value))


async def _served(store: Store) -> None:
    """Every list holds the sessions that can be read, and the feed continues."""
    for _ in range(4):
        assert {each.id for each in await store.sessions(limit=9)} == {"a", "c"}
        page = await store.feed(0, limit=9, tenant="")
        assert ([each.id for each in page.sessions], page.end) == (["a", "c"], page.sessions[-1].position)
        assert (await store.feed(0, limit=9)).sessions == page.sessions
        assert await store.session("b") is None
    await add(store, turn := make_turn("d"))
    await feed.finish_idle(store, time.time() + 1)
    last = (await store.feed(0, limit=9)).sessions[-1]
    assert (last.id, last.cause, math.isfinite(last.used)) == ("d", Cause.IDLE, True)
    assert await store.turns("d") == [turn]
    assert (await store.evict()).rollouts == 0


@pytest.mark.parametrize(("field", "value"), _OF_SESSIONS.values(), ids=_OF_SESSIONS.keys())
async def test_a_damaged_session_is_left_out(
    shared_url: str, field: str, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    guarded = GuardedStore(make_store(shared_url, Limits()), Metrics())
    store = cast(Store, guarded)
    await store.open()
    for rollout in ("a", "b", "c"):
        await add(store, make_turn(rollout))
        await store.finish(rollout, Cause.REWARD, {"": 1.0})
    _change(shared_url, {field: value}, {})
    await _served(store)
    health = guarded.health()
    assert (health.state, health.unreadable, health.unreadable_records) == ("ok", 1, ["session b"])
    assert caplog.text.count("session b is damaged") == 1
    await add(store, turn := make_turn("b"))
    assert turn in await store.turns("b") and guarded.health().state == "ok"
    await store.aclose()


@pytest.mark.parametrize("value", _OF_VALUES.values(), ids=_OF_VALUES.keys())
async def test_a_damaged_value_is_left_out_until_it_is_written_again(shared_url: str, value: bytes) -> None:
    guarded = GuardedStore(make_store(shared_url, Limits()), Metrics())
    store = cast(Store, guarded)
    await store.open()
    await add(store, make_turn("a"))
    await store.finish("a", Cause.END)
    end = (await store.feed(0, limit=1)).end
    await feed.acknowledge(store, "", "sound", 0)
    names = [("consumers", "/k"), ("idle", ""), ("clock", ""), ("fleets/f", "x")]
    _change(shared_url, {}, dict.fromkeys(names, value))
    assert [each.name for each in await feed.consumers(store)] == ["sound"]
    assert await feed.acknowledged(store, "", "k") is None
    assert await feed.acknowledged_by_all(store) == {"": 0}
    assert (await store.evict()).rollouts == 0  # reads and writes the clock
    await add(store, make_turn("b"))
    await feed.finish_idle(store, time.time() + 1)
    assert (await store.feed(end, limit=9)).sessions[0].id == "b"
    records = guarded.health().unreadable_records
    assert sorted(records) == ["clock ", "consumers k", "idle "]
    if value != b"=\xff":  # what the fleet's processes share is not left out, but refused
        with pytest.raises(SharedError):
            await StoredWords(store, "f").read()
    assert await feed.acknowledge(store, "", "k", end) == end
    assert [(each.name, each.position) for each in await feed.consumers(store)] == [("k", end), ("sound", 0)]
    _change(shared_url, {}, {("consumers", "/k"): value})
    assert await feed.forget(store, "", "k") and not await feed.forget(store, "", "k")
    await store.aclose()


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM totals",
        "UPDATE totals SET last = 9223372036854775807",
        "UPDATE totals SET size = 'x', last = 'x'",
    ],
)
async def test_totals_that_are_damaged_are_restored(sqlite_url: str, damage: str) -> None:
    async with opened(sqlite_url) as store:
        for rollout in ("a", "b"):
            await add(store, make_turn(rollout))
        await store.finish("a", Cause.END)
        held, end = await usage(store), (await store.feed(0, limit=1)).end
        with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite://"))) as connection, connection:
            connection.execute(damage)
        assert (await store.feed(0, limit=1)).end == end
        assert (await store.oldest(0.0, 1))[0] == held.size  # type: ignore[attr-defined]
        await store.finish("b", Cause.END)
        assert [each.id for each in (await store.feed(end, limit=9)).sessions] == ["b"]


@pytest.mark.parametrize("damage", [b"x", b"inf", b"9223372036854775807"])
async def test_totals_of_redis_that_are_damaged_begin_anew(redis_url: str, damage: bytes) -> None:
    async with opened(redis_url) as store:
        await add(store, make_turn("a"))
        await feed.acknowledge(store, "", "k", 0)
        with redis.Redis.from_url(redis_url) as client:
            for field in ("size", "last"):
                client.hset("tokenproxy:{sessions}:totals", field, damage)
            client.set("tokenproxy:{v/consumers}:bytes", damage)
            client.set("tokenproxy:{s/broken}:turns", "no hash")
            client.zadd(b"tokenproxy:key:" + digest_of("k"), {b"\xff": 0.0})
        assert (await store.find([digest_of("k")]))[digest_of("k")].groups[0].candidates == [("", "")]
        await add(store, make_turn("b"))
        await store.finish("b", Cause.END)
        await feed.acknowledge(store, "", "other", 0)
        assert [each.waiting for each in await feed.consumers(store)] == [1, 1]
        with pytest.raises(RecordRefused):  # the store works: nothing else waits for it
            await add(store, make_turn("broken"))


async def test_a_caller_that_left_spoils_nothing(sqlite_url: str) -> None:
    async with opened(sqlite_url) as store:
        tasks = [asyncio.ensure_future(add(store, make_turn(f"r{n}"))) for n in range(20)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [len(await store.turns(f"r{n}")) for n in range(1, 20, 2)] == [1] * 10


async def test_no_server(tmp_path: Path) -> None:
    with held_port() as port:
        url = f"redis://127.0.0.1:{port}/3"
        await _refused(url.replace("//", "//user:secret@"), url, "running")
    with run_redis(tmp_path) as port:
        store = make_store(f"redis://127.0.0.1:{port}/0", Limits())
        await store.open()
    for call in (add(store, make_turn()), store.find([digest_of("k")])):
        with pytest.raises(StoreError, match=f"127.0.0.1:{port}"):
            await call
    await store.aclose()


async def test_a_wrong_password(tmp_path: Path) -> None:
    with run_redis(tmp_path, "--requirepass", "right") as port:
        await _refused(f"redis://:secret@127.0.0.1:{port}/0", f"127.0.0.1:{port}", "password")
        async with opened(f"valkey://:right@127.0.0.1:{port}/0"):
            pass


async def test_idle_connections_that_the_server_closed(redis_url: str, redis_port: int) -> None:
    async with opened(redis_url) as store:
        await asyncio.gather(*(add(store, make_turn()) for _ in range(10)))
        with redis.Redis(port=redis_port) as client:
            client.client_kill_filter(_type="normal", skipme=True)
        for _ in range(10):
            assert len(await store.turns("r")) == 10
