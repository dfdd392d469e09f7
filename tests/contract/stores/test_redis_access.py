"""TLS, users with few rights, and memory that ends: on a Redis server of the test's own."""

import asyncio
import logging
import os
import re
import time
from pathlib import Path

import pytest
import redis

from proxy.history.feed import Cause
from proxy.history.store import Limits, Store, StoreError, StoreUnusable
from proxy.metrics import Metrics
from proxy.stores import redis_scripts
from proxy.stores.guarded import GuardedStore
from proxy.stores.urls import make_store
from tests.contract.stores.certificates import Certificates, make_certificates
from tests.support.ports import held_port
from tests.support.redis_server import run_redis
from tests.support.store_utils import add, digest_of, entry, make_response, make_session, make_turn, opened

_DOCS = Path(__file__).parents[3] / "docs" / "redis.md"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


async def test_tls(tmp_path: Path, certificates: Certificates) -> None:
    turn, trusted = make_turn(), f"?ssl_ca_certs={certificates.authority}"
    with held_port() as port, run_redis(tmp_path, *certificates.options(port)):
        for database, url in enumerate((f"rediss://localhost:{port}", f"valkeys://localhost:{port}")):
            for options in ("", "&partitions=3"):
                async with opened(f"{url}/{2 * database + bool(options)}{trusted}{options}") as store:
                    await add(store, turn)
                    assert await store.path(turn.id) == [turn]
        for url, message in (
            (f"rediss://localhost:{port}/0", "CERTIFICATE_VERIFY_FAILED"),
            (f"redis://localhost:{port}/0?socket_timeout=0.5", f"localhost:{port}"),
        ):
            store = make_store(url, Limits())
            with pytest.raises(StoreError, match=message):
                await store.open()
            await store.aclose()


def documented_rules() -> str:
    """The user's rules, as the documentation has them."""
    found = re.search(r"ACL SETUSER tokenproxy ((?:.|\n)*?)```", _DOCS.read_text())
    assert found is not None
    return found[1].replace("\\\n", " ")


async def use_all(store: Store) -> None:
    """Call every method."""
    session, turns = make_session("t/r", tenant="t"), [make_turn("t/r"), make_turn("t/r")]
    await store.add(session, turns, [[entry("k", "ids")]] * 2)
    await add(store, make_turn("t/r", parent=turns[0].id, prompt_turn=turns[1].id), entry("k", "ids"))
    await add(store, make_turn("other"), entry("k", "ids"))
    assert (await store.find([digest_of("k")]))[digest_of("k")].total == 4
    assert await store.evicted([digest_of("k")]) == set()
    assert await store.claim(turns[1].id)
    await store.release(turns[1].id)
    await store.pin("t/r", time.time() + 0.001)
    assert await store.path(turns[0].id) == turns[:1]
    assert len(await store.turns("t/r")) == len(await store.newest("t/r", 9)) == 3
    await store.save_session(session)
    assert await store.session("t/r") is not None
    first = (await store.sessions(limit=1))[0]
    assert len(await store.sessions(limit=9, tenant="t")) == 1 and first.ambiguous
    assert await store.set_rewards("t/r", {"": 1.0}) and await store.rewards("t/r") == {"": 1.0}
    response = make_response(b"k" * 16)
    await store.keep_response(response)
    assert await store.responses(response.key) == [response] and await store.take_response(response)
    await store.change_replica("fleet", "http://a:1", "removed")
    assert await store.replica_changes("fleet") == {"http://a:1": "removed"}
    await store.change_replica("fleet", "http://a:1", None)
    assert len(await store.secret()) == 32
    await store.documents.keep("d", b"{}")
    assert await store.documents.read(["d"]) == {"d": b"{}"} and await store.documents.delete("d")
    assert await store.feed.finish("other", Cause.END) and len(await store.feed.read(0, limit=9)) == 2
    await store.feed.finish_idle(time.time() + 9, 9)
    await store.feed.acknowledge("t", "c", await store.feed.end())
    assert await store.feed.acknowledged("t", "c") and len(await store.feed.consumers()) == 1
    assert await store.feed.forget("t", "c")
    assert await store.delete("t/r")
    for number in range(30):
        await add(store, make_turn(f"r{number}", completion=os.urandom(3000)), entry(f"{number}"))
    await store.evict()
    assert (await store.usage()).turns < 31


@pytest.mark.parametrize("options", ["", "?partitions=3"])
async def test_a_user_with_the_documented_rights(tmp_path: Path, options: str) -> None:
    with run_redis(tmp_path) as port:
        with redis.Redis(port=port) as client:
            client.execute_command(
                "ACL", "SETUSER", "tokenproxy", *documented_rules().replace("PASSWORD", "word").split()
            )
        url = f"redis://tokenproxy:word@127.0.0.1:{port}/0{options}"
        async with opened(url, Limits(max_bytes=60_000)) as store:
            await use_all(store)
        with redis.Redis(port=port, username="tokenproxy", password="word") as client:
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.get("another:key")
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.flushall()


def test_the_documented_rights_are_those_that_scripts_need() -> None:
    folder = Path(redis_scripts.__file__).parent
    scripts = "".join(file.read_text() for file in folder.glob("redis*.py"))
    used = {name.lower() for name in re.findall(r"redis\.p?call\('(\w+)'", scripts)}
    client = {"eval", "evalsha", "select", "asking", "command", "cluster"}
    granted = {rule[1:].partition("|")[0] for rule in documented_rules().split() if rule.startswith("+")}
    assert granted == used | client


async def test_a_user_without_rights(tmp_path: Path) -> None:
    with run_redis(tmp_path) as port:
        with redis.Redis(port=port) as client:
            client.execute_command("ACL", "SETUSER", "few", "on", ">word", "~tokenproxy:*", "+get")
        store = make_store(f"redis://few:word@127.0.0.1:{port}/0", Limits())
        with pytest.raises(StoreUnusable, match="give its user the commands and keys"):
            await store.open()
        await store.aclose()


@pytest.mark.parametrize("options", ["", "?partitions=2"])
async def test_a_server_that_drops_keys_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: str
) -> None:
    with run_redis(tmp_path) as port, redis.Redis(port=port) as client:
        for database, policy in enumerate(("allkeys-lru", "volatile-lru", "noeviction")):
            client.config_set("maxmemory-policy", policy)
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                async with opened(f"redis://127.0.0.1:{port}/{database}{options}"):
                    pass
            reported = "set its maxmemory-policy to noeviction" in caplog.text
            assert reported == (policy == "allkeys-lru")


@pytest.mark.parametrize("options", ["", "?partitions=2"])
async def test_a_full_server_is_not_recorded_to_until_it_has_memory(tmp_path: Path, options: str) -> None:
    """Turns wait meanwhile; none is lost if memory is given in time."""
    with run_redis(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as port:
        url, metrics = f"redis://127.0.0.1:{port}/0{options}", Metrics()
        store = GuardedStore(make_store(url, Limits()), metrics)
        await store.open()
        turns = [make_turn(f"r{number}", completion=os.urandom(500_000)) for number in range(30)]
        for turn in turns:
            await add(store, turn, entry(turn.id, "ids"))
        health = store.health()
        assert health.state == "unavailable" and health.queued_turns > 5
        assert "maxmemory" in (health.error or "")
        # this process knows the turns that wait, and can read the others
        for turn in turns:
            assert await store.path(turn.id) == [turn]
        # a proxy that starts now can read, too, and makes room
        async with opened(url) as other:
            assert (await other.usage()).turns >= 5
            assert await other.delete("r0")
        with redis.Redis(port=port) as client:
            client.config_set("maxmemory", "64mb")
        async with asyncio.timeout(15):
            while store.health().state != "ok":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert store.health().queued_turns == store.health().lost_turns == 0
        assert (await store.usage()).turns == len(turns) - 1
        await store.aclose()
