"""Changes of the fleet by the admin API: shared through a store, and what happens while it does not work."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.fleet.memory_engine import MemoryEngine, fleet_of, replica_of
from tests.contract.fleet.replicas import Start
from tests.support.fake_vllm import FakeVllm
from tests.support.stepped import stepped
from tests.support.utils import run_app, run_proxy, wait_until
from tokenproxy.fleet.membership import Membership, fleet_id
from tokenproxy.fleet.weight_state import SharedError
from tokenproxy.record.store import Limits
from tokenproxy.settings import Settings
from tokenproxy.store.fleet_words import StoredWords
from tokenproxy.store.sqlite import SqliteStore

_ADMIN = "/admin/replicas"
_A, _B = "http://a:1", "http://b:2"
_NEVER_S = 600.0


def _states(client: httpx.Client) -> dict[str, str]:
    """What a proxy would do with each replica: `used`, `drained`, or `down`."""
    return {
        each["engine"]: "down" if not each["ready"] else "drained" if each["draining"] else "used"
        for each in client.get(_ADMIN).json()["replicas"]
    }


def _add(client: httpx.Client, engine: FakeVllm) -> Any:
    return client.post(_ADMIN, json={"url": engine.url}).raise_for_status().json()


def _drain(client: httpx.Client, engine: FakeVllm) -> Any:
    return client.post(f"{_ADMIN}/drain", json={"url": engine.url}).raise_for_status().json()


def _remove(client: httpx.Client, engine: FakeVllm) -> Any:
    return client.delete(_ADMIN, params={"url": engine.url}).raise_for_status().json()


# --- two proxies over one store


def test_processes_share_changes_and_apply_their_own_at_once(start: Start, shared_url: str) -> None:
    first, second = start(), start()
    settings: dict[str, Any] = {"store": shared_url, "watch_interval_s": _NEVER_S}
    with run_proxy([first], store=shared_url) as there, run_proxy([first], **settings) as here:
        assert _add(here, second)["changes"] == {second.url: "added"}
        wait_until(lambda: _states(there) == {first.url: "used", second.url: "used"})
        # each reads what was changed before it changes anything
        assert _drain(there, first)["changes"] == {first.url: "drained", second.url: "added"}
        assert [each["engine"] for each in _remove(here, first)["replicas"]] == [second.url]
        wait_until(lambda: _states(there) == {second.url: "used"})
        _add(here, first)
        _remove(here, second)
        wait_until(lambda: _states(there) == {first.url: "used"})
        listed = there.get(_ADMIN).json()
        assert listed["changes"] == {}


def test_a_process_that_starts_later_applies_changes(start: Start, sqlite_url: str) -> None:
    first, second, third = start(), start(), start()
    with run_proxy([first, second], store=sqlite_url) as client:
        _remove(client, first)
        _drain(client, second)
        _add(client, third)
    with run_proxy([first, second], store=sqlite_url) as client:
        wait_until(lambda: _states(client) == {second.url: "drained", third.url: "used"})
        _add(client, first)
        _add(client, second)
        wait_until(lambda: set(_states(client).values()) == {"used"} and len(_states(client)) == 3)


def test_equal_settings_name_one_fleet() -> None:
    file = Path("/etc/engines.txt")
    assert fleet_id([_A, _B], file) == fleet_id([_B, _A, "http://user:key@a:1"], file)
    others = [fleet_id([_A], file), fleet_id([_A, _B], None), fleet_id([_A, _B], Path("/etc/others.txt"))]
    assert len({fleet_id([_A, _B], file), *others}) == 4


def test_no_credentials_are_stored(start: Start, tmp_path: Path) -> None:
    first, second = start(), start()
    secret = first.url.replace("http://", "http://user:secret@")
    file = tmp_path / "x.db"
    settings = Settings(upstreams=[secret, second.url], store=f"sqlite://{file}", watch_interval_s=0.05)
    with run_app(settings) as client:
        _drain(client, first)
        assert client.post(f"{_ADMIN}/drain", json={"url": secret}).status_code == 200
        with closing(sqlite3.connect(file)) as connection:
            rows = connection.execute(
                "SELECT space, name, value FROM kept WHERE name LIKE 'http%'"
            ).fetchall()
    assert rows == [(f"fleets/{fleet_id([first.url, second.url], None)}", first.url, b"=drained")]


def test_a_change_that_the_store_does_not_take_changes_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*arguments: object) -> None:
        raise SharedError("the store is down")

    first, second = start(), start()
    with run_proxy([first], store="memory:") as client:
        for call in ("write", "read"):
            monkeypatch.setattr(StoredWords, call, fail)
            refused = client.post(_ADMIN, json={"url": second.url})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
            assert "the store is down" in refused.json()["error"]["message"]
            assert client.delete(_ADMIN, params={"url": first.url}).status_code == 503
        listed = client.get(_ADMIN).json()
        assert ([each["engine"] for each in listed["replicas"]], listed["changes"]) == ([first.url], {})


@stepped
async def test_what_was_read_before_a_change_does_not_undo_it() -> None:
    words = StoredWords(SqliteStore(None, Limits()), "fleet")
    async with fleet_of() as fleet:
        membership = Membership(fleet, lambda url: replica_of(MemoryEngine(url)), words, [_A])
        await membership.refresh()
        read = words.read
        written: list[bool] = []

        async def read_slowly() -> dict[str, str]:
            earlier = await read()
            if not written:
                written.append(True)
                await membership.remove(_A)
            return earlier

        words.read = read_slowly  # type: ignore[method-assign]
        await membership.refresh()
        assert membership.changes == {_A: "removed"}


@stepped
async def test_a_change_that_this_version_does_not_know_is_not_applied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = StoredWords(SqliteStore(None, Limits()), "fleet")
    await words.write(_A, "moved")
    async with fleet_of() as fleet:
        membership = Membership(fleet, lambda url: replica_of(MemoryEngine(url)), words, [_A])
        await membership.refresh()
        assert (len(fleet.replicas), membership.changes) == (1, {})
        assert caplog.text.count("'moved'") == 1
