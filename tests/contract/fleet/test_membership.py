"""Replicas that come and go: the sources that name them, and the admin API."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.fleet.memory_engine import MemoryEngine, fleet_of, replica_of
from tests.contract.fleet.replicas import Start, state_of
from tests.support.fake_vllm import FakeVllm
from tests.support.stepped import elapse, stepped
from tests.support.utils import run_proxy, wait_until
from tokenproxy.base.tasks import end_tasks, repeat
from tokenproxy.base.urls import UpstreamsError, normalise_upstream
from tokenproxy.fleet.membership import Membership, resolve_host
from tokenproxy.fleet.replica import Replica
from tokenproxy.record.store import Limits
from tokenproxy.settings import SettingsError, load_settings
from tokenproxy.store.fleet_words import StoredWords
from tokenproxy.store.sqlite import SqliteStore

_CHAT, _ADMIN = "/v1/chat/completions", "/admin/replicas"
_HI = {"messages": [{"role": "user", "content": "Hi"}]}
_A, _B = "http://a:1", "http://b:2"


def _run(client: httpx.Client, engines: list[FakeVllm]) -> list[bool]:
    """Send some requests; for each engine whether it got any of them."""
    before = [len(engine.generations()) for engine in engines]
    for number in range(4):
        answer = client.post(_CHAT, json={"messages": [{"role": "user", "content": f"Hi {number}"}]})
        assert answer.status_code == 200
    return [len(engine.generations()) > count for engine, count in zip(engines, before, strict=True)]


def test_a_replica_is_added_drained_and_removed(start: Start) -> None:
    first, second = engines = [start(), start()]
    with run_proxy([first], store="memory:") as client:
        assert client.post(_ADMIN, json={"url": second.url + "/v1/"}).status_code == 200
        wait_until(lambda: all(each["ready"] for each in client.get("/ready").json()["engines"]))
        wait_until(lambda: state_of(client, second) == "ready")
        assert _run(client, engines) == [True, True]
        wait_until(lambda: not any(each["requests"] for each in client.get("/ready").json()["engines"]))
        drained = client.post(f"{_ADMIN}/drain", json={"url": first.url}).json()["replicas"][0]
        assert (drained["draining"], drained["requests"]) == (True, 0)
        assert state_of(client, first) == "draining"
        assert _run(client, engines) == [False, True]
        client.post(_ADMIN, json={"url": first.url})
        assert state_of(client, first) == "ready"
        assert client.delete(_ADMIN, params={"url": second.url}).status_code == 200
        assert _run(client, engines) == [True, False]
        assert [replica["engine"] for replica in client.get(_ADMIN).json()["replicas"]] == [first.url]
        wait_until(lambda: second.url not in client.get("/metrics").text)

        wrong: list[tuple[str, str, dict[str, Any], int]] = [
            ("POST", _ADMIN, {"json": {"url": "ftp://a"}}, 400),
            ("POST", _ADMIN, {"json": {"url": "http://a\nb:1"}}, 400),
            ("POST", _ADMIN, {"json": {"url": f"http://{'a' * 64}.b:1"}}, 400),
            ("POST", _ADMIN, {"json": {"url": "http://user:secret@a:1"}}, 400),
            ("DELETE", _ADMIN, {"params": {"url": _A}}, 404),
            ("POST", f"{_ADMIN}/drain", {"json": {"url": _A}}, 404),
        ]
        for method, path, sent, status in wrong:
            assert client.request(method, path, **sent).status_code == status, (path, sent)
        assert len(client.get(_ADMIN).json()["replicas"]) == 1


@asynccontextmanager
async def _membership(
    *upstreams: str, interval_s: float = 5.0, **options: Any
) -> AsyncIterator[tuple[Membership, list[str]]]:
    """A membership that was started, and the URLs of which replicas were made."""
    made: list[str] = []

    def make(url: str) -> Replica:
        made.append(url)
        return replica_of(MemoryEngine(url.replace("user:one@", "").replace("user:two@", "")))

    async with fleet_of(watch_interval_s=interval_s) as fleet:
        membership = Membership(
            fleet, make, StoredWords(SqliteStore(None, Limits()), "fleet"), upstreams, **options
        )
        await membership.refresh()
        watch = asyncio.create_task(repeat(membership.watch, "the membership is not watched"))
        try:
            yield membership, made
        finally:
            await end_tasks(watch)


def _names(membership: Membership) -> list[str]:
    return sorted(replica.name for replica in membership.fleet.replicas)


@stepped
async def test_a_name_is_resolved_again_and_a_failure_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    addresses = [_A]

    async def resolve(url: str) -> list[str]:
        if not addresses:
            raise UpstreamsError("the name server is down")
        return list(addresses)

    async with _membership("dns+http://engines:8000", resolve=resolve) as (membership, _):
        assert _names(membership) == [_A]
        addresses.append(_B)
        await elapse(4.9)
        assert _names(membership) == [_A]
        await elapse(0.2)
        assert _names(membership) == [_A, _B]
        kept = membership.fleet.replicas[1]
        addresses.clear()
        await elapse(20.0)
        assert _names(membership) == [_A, _B]
        assert caplog.text.count("the name server is down") == 1
        addresses.append(_B)
        await elapse(5.0)
        assert membership.fleet.replicas == [kept]


@stepped
async def test_a_file_is_read_again_and_a_new_password_makes_a_new_replica(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "engines.txt"
    file.write_text(f"# the fleet\n{_A}\n")
    async with _membership(file=file, interval_s=600.0) as (membership, made):
        file.write_text(f"http://user:one@a:1\n\n{_B}/v1  # new\n")
        await membership.refresh()
        assert (_names(membership), made) == ([_A, _B], [_A, "http://user:one@a:1", _B])
        for unreadable in ("nonsense\n", "# nothing\n", None):
            file.unlink() if unreadable is None else file.write_text(unreadable)
            await membership.refresh()
            assert _names(membership) == [_A, _B]
        assert caplog.text.count("stay as they were") == 3
        file.write_text(f"http://user:two@a:1\n{_B}\n")
        await membership.refresh()
        assert (_names(membership), made[3:]) == ([_A, _B], ["http://user:two@a:1"])


async def test_a_name_stands_for_its_addresses() -> None:
    assert "http://127.0.0.1:8000" in await resolve_host("dns+http://localhost:8000")
    with pytest.raises(UpstreamsError, match=r"no-such-name\.invalid"):
        await resolve_host("dns+http://no-such-name.invalid:8000")
    with pytest.raises(UpstreamsError, match=r"docs/ray\.md"):
        await resolve_host("ray-actor://engines")


def test_upstreams_are_normalised_and_wrong_ones_are_wrong_settings(tmp_path: Path) -> None:
    assert normalise_upstream("dns+http://engines:8000/v1") == "dns+http://engines:8000"
    assert normalise_upstream("http://a:1/") == "http://a:1"
    hosts = ("a\tb", "a\nb", "a b", "a\x00b", "a\xa0b", "a..b", ".a", "a" * 64, f"b.{'a' * 64}.c", "ä" * 60)
    for url in [f"{scheme}://{host}:1" for scheme in ("http", "dns+http") for host in hosts]:
        with pytest.raises(ValueError, match="not an http"):
            normalise_upstream(url)
    with pytest.raises(ValueError, match="names no actors"):
        normalise_upstream("ray-actor://a b")
    file = tmp_path / "engines.txt"
    with pytest.raises(SettingsError, match="upstreams_file"):
        load_settings(upstreams_file=file)
    file.write_text("http://a:1\nb:2\n")
    with pytest.raises(SettingsError, match=r"engines\.txt.*b:2"):
        load_settings(upstreams_file=file)
