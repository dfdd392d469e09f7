"""A master that sentinels watch: it dies, its replica takes over, and the store goes on."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from proxy.history.store import Limits
from proxy.metrics import Metrics
from proxy.stores.guarded import GuardedStore
from proxy.stores.urls import make_store
from tests.support.redis_cluster import is_up_to_date, wait_for
from tests.support.redis_server import RedisServer, run_sentinel
from tests.support.store_utils import add, digest_of, entry, make_turn, opened

_PATIENCE_S = 30.0


@dataclass
class _Group:
    master: RedisServer
    replica: RedisServer
    sentinels: list[int]

    @property
    def url(self) -> str:
        # the first does not exist: the others are asked
        hosts = ",".join(f"127.0.0.1:{port}" for port in (1, *self.sentinels))
        return f"redis+sentinel://{hosts}/the-master/0"


def _ready(port: int) -> bool:
    """Whether a sentinel knows the replica and the other sentinels."""
    with redis.Redis(port=port) as client, suppress(redis.RedisError):
        [state] = client.sentinel_masters().values()
        return bool(state["num-slaves"] == 1 and state["num-other-sentinels"] == 2)
    return False


@pytest.fixture
def group(tmp_path: Path) -> Iterator[_Group]:
    """A master, its replica and three sentinels."""
    with ExitStack() as stack:
        servers: list[RedisServer] = []
        for name in ("master", "replica"):
            (tmp_path / name).mkdir()
            of = ("--replicaof", f"127.0.0.1 {servers[0].port}") if servers else ()
            server = RedisServer(tmp_path / name, ("--repl-diskless-sync-delay", "0", *of))
            server.start()
            stack.callback(server.kill)
            servers.append(server)
        with redis.Redis(port=servers[1].port) as client:
            wait_for(lambda: client.info("replication")["master_link_status"] == "up")
        ports = []
        for number in range(3):
            (folder := tmp_path / f"s{number}").mkdir()
            ports.append(stack.enter_context(run_sentinel(folder, servers[0].port, quorum=2)))
        wait_for(lambda: all(map(_ready, ports)))
        yield _Group(servers[0], servers[1], ports)


async def test_a_master_that_dies(group: _Group) -> None:
    """What the replica had is there; turns that came meanwhile wait, and are recorded in the end."""
    store = GuardedStore(make_store(group.url, Limits()), Metrics())
    await store.open()
    turns = [make_turn(f"r{number}", completion=b"") for number in range(50)]
    for turn in turns:
        await add(store, turn, entry(turn.id, "ids"))
    await asyncio.to_thread(wait_for, lambda: is_up_to_date(group.replica, group.master))
    group.master.send(signal.SIGKILL)
    later = [make_turn(f"s{number}", completion=b"") for number in range(20)]
    for turn in later:
        await add(store, turn, entry(turn.id, "ids"))
    assert store.health().state != "ok" and store.health().queued_turns == 20
    async with asyncio.timeout(_PATIENCE_S):
        while store.health().state != "ok":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert store.health().queued_turns == store.health().lost_turns == 0
    for turn in (*turns, *later):
        assert await store.path(turn.id) == [turn]
    await store.aclose()
    async with opened(group.url) as other:
        assert (await other.usage()).turns == 70
        assert len(await other.find([digest_of(turn.id) for turn in turns])) == 50
