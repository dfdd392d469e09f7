"""TLS, users with few rights, and memory that ends: on a Redis server of the test's own."""

import asyncio
import logging
import os
import re
import time
from pathlib import Path

import pytest
import redis

from tests.support.certificates import make_certificate
from tests.support.ports import held_port
from tests.support.redis_server import run_redis
from tests.support.store_utils import add, digest_of, entry, make_turn, opened, usage
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.store import Limits, StoreError
from tokenproxy.record.vocabulary import Cause
from tokenproxy.store import redis_scripts
from tokenproxy.store.guarded import GuardedStore
from tokenproxy.store.urls import make_store


async def test_tls(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    files = f"--tls-cert-file {certificate} --tls-key-file {key} --tls-ca-cert-file {certificate}"
    turn, trusted = make_turn(), f"?ssl_ca_certs={certificate}"
    with (
        held_port() as port,
        run_redis(tmp_path, *files.split(), "--tls-auth-clients", "no", "--tls-port", str(port)),
    ):
        for url in (f"rediss://localhost:{port}/0{trusted}", f"valkeys://localhost:{port}/1{trusted}"):
            async with opened(url) as store:
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


def _documented_rules() -> list[str]:
    """The user's rules, as the documentation has them."""
    docs = Path(__file__).parents[3] / "docs" / "redis.md"
    found = re.search(r"ACL SETUSER tokenproxy ((?:.|\n)*?)```", docs.read_text())
    assert found is not None
    return found[1].replace("\\\n", " ").split()


async def test_a_user_with_the_documented_rights(tmp_path: Path) -> None:
    with run_redis(tmp_path) as port:
        rules = [rule.replace("PASSWORD", "word") for rule in _documented_rules()]
        with redis.Redis(port=port) as client:
            client.execute_command("ACL", "SETUSER", "tokenproxy", *rules)
        url = f"redis://tokenproxy:word@127.0.0.1:{port}/0"
        async with opened(url, Limits(max_bytes=60_000)) as store:
            turn = make_turn()
            await add(store, turn, entry("k", "ids"))
            assert (await store.find([digest_of("k")]))[digest_of("k")].total == 1
            assert await store.claim(digest_of("k"), digest_of("ids")) == turn.id
            await store.release(turn.id)
            assert await store.path(turn.id) == await store.turns("r") == [turn]
            assert await store.newest("r", 1) == [turn.id]
            await store.pin("r", time.time() + 0.001)
            assert len(await store.sessions(limit=9)) == 1
            assert await store.finish("r", Cause.REWARD, {"": 1.0})
            assert (await store.feed(0, limit=1, tenant="")).waiting == 1
            assert await store.put("x", "d", b"{}") and await store.get("x")
            assert await store.put("x", "d", None)
            for number in range(30):
                await add(store, make_turn(f"r{number}", completion=os.urandom(3000)), entry(f"{number}"))
            await store.evict()
            assert (await usage(store)).turns < 31
        with redis.Redis(port=port, username="tokenproxy", password="word") as client:
            for forbidden in ("GET another:key", "FLUSHALL"):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.execute_command(*forbidden.split())


def test_the_documented_rights_are_those_that_scripts_need() -> None:
    folder = Path(redis_scripts.__file__).parent
    scripts = "".join(file.read_text() for file in folder.glob("redis*.py"))
    called = re.findall(r"(?:redis\.p?call\('|Call\(\")(\w+)", scripts)
    used = {name.lower() for name in called}
    client = {"eval", "evalsha", "select", "asking", "command", "cluster", "wait", "exists", "hkeys"}
    granted = {rule[1:].partition("|")[0] for rule in _documented_rules() if rule.startswith("+")}
    assert granted == used | client


async def test_a_server_that_drops_keys_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with run_redis(tmp_path) as port, redis.Redis(port=port) as client:
        for database, policy in enumerate(("allkeys-lru", "volatile-lru", "noeviction")):
            client.config_set("maxmemory-policy", policy)
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                async with opened(f"redis://127.0.0.1:{port}/{database}"):
                    pass
            reported = "set its maxmemory-policy to noeviction" in caplog.text
            assert reported == (policy == "allkeys-lru")


async def test_a_full_server_is_not_recorded_to_until_it_has_memory(tmp_path: Path) -> None:
    """Turns wait meanwhile; none is lost if memory is given in time."""
    with run_redis(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as port:
        url = f"redis://127.0.0.1:{port}/0"
        store = GuardedStore(make_store(url, Limits()), Metrics())
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
            assert await other.delete("r0")
        with redis.Redis(port=port) as client:
            client.config_set("maxmemory", "64mb")
        async with asyncio.timeout(15):
            while store.health().state != "ok":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert store.health().queued_turns == store.health().lost_turns == 0
        assert (await usage(store)).turns == len(turns) - 1
        await store.aclose()
