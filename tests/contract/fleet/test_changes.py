"""Changes of the fleet by the admin API: shared through a store, and what happens while it does not work."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.fleet.changes import Changes, ChangesError, ReplicaChange, fleet_id
from proxy.history.store import Store
from proxy.settings import Settings
from proxy.stores.fleet_state import StoredChanges
from tests.support.fake_vllm import FakeVllm
from tests.support.store_utils import opened
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_app, run_proxy, wait_until

_ADMIN = "/admin/replicas"
_A, _B = "http://a:1", "http://b:2"
_NEVER_S = 600.0
ADDED, REMOVED, DRAINED = ReplicaChange.ADDED, ReplicaChange.REMOVED, ReplicaChange.DRAINED


@pytest.fixture
def start(tiny_model: TinyModel) -> Iterator[Callable[..., FakeVllm]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(FakeVllm(tiny_model))


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


def test_processes_share_changes_and_apply_their_own_at_once(
    start: Callable[..., FakeVllm], shared_url: str
) -> None:
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
        assert listed["changes"] == {} and "problem" not in listed


def test_a_process_that_starts_later_applies_changes(start: Callable[..., FakeVllm], sqlite_url: str) -> None:
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


def test_no_credentials_are_stored(start: Callable[..., FakeVllm], tmp_path: Path) -> None:
    first, second = start(), start()
    secret = first.url.replace("http://", "http://user:secret@")
    file = tmp_path / "x.db"
    settings = Settings(upstreams=[secret, second.url], store=f"sqlite://{file}", watch_interval_s=0.05)
    with run_app(settings) as client:
        _drain(client, first)
        assert client.post(f"{_ADMIN}/drain", json={"url": secret}).status_code == 200
        with closing(sqlite3.connect(file)) as connection:
            rows = connection.execute("SELECT * FROM replica_changes").fetchall()
    assert rows == [(fleet_id([first.url, second.url], None), first.url, "drained")]


def test_changes_apply_here_while_the_store_does_not_take_them(
    start: Callable[..., FakeVllm], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*arguments: object) -> None:
        raise ChangesError("the store is down")

    monkeypatch.setattr(StoredChanges, "write", fail)
    first, second = start(), start()
    with run_proxy([first], store="memory:") as client:
        answer = _add(client, second)
        assert [each["engine"] for each in answer["replicas"]] == [first.url, second.url]
        for told in (answer, client.get(_ADMIN).json()):
            assert second.url in told["problem"] and "other processes" in told["problem"]
        assert "until the store takes it" in caplog.text


# --- the changes that one process knows


class _Unreliable:
    """The changes of a fleet in a store that this process cannot always reach."""

    def __init__(self, store: Store) -> None:
        self.stored = StoredChanges(store, "fleet")
        self.down = False
        self.meanwhile: Callable[[], Any] | None = None
        """Runs between the moment when the store is read and that when its answer arrives."""

    async def read(self) -> dict[str, ReplicaChange]:
        if self.down:
            raise ChangesError("the store is down")
        read = await self.stored.read()
        if self.meanwhile is not None:
            await self.meanwhile()
        return read

    async def write(self, name: str, change: ReplicaChange | None) -> None:
        if self.down:
            raise ChangesError("the store is down")
        await self.stored.write(name, change)


async def test_a_change_is_shared_once_the_store_takes_it(sqlite_url: str) -> None:
    async with opened(sqlite_url) as store, opened(sqlite_url) as other_store:
        link, other = _Unreliable(store), Changes(StoredChanges(other_store, "fleet"))
        changes = Changes(link)
        await changes.refresh()
        link.down = True
        await changes.set(_A, REMOVED)
        await changes.refresh()
        assert (changes.current, changes.unshared) == ({_A: REMOVED}, [_A])
        await other.refresh()
        assert other.current == {}
        link.down = False
        await changes.refresh()
        assert (changes.current, changes.unshared) == ({_A: REMOVED}, [])
        await other.refresh()
        assert other.current == {_A: REMOVED}


async def test_a_newer_change_of_another_process_counts(sqlite_url: str) -> None:
    async with opened(sqlite_url) as store, opened(sqlite_url) as other_store:
        link, other = _Unreliable(store), Changes(StoredChanges(other_store, "fleet"))
        changes = Changes(link)
        await changes.set(_A, DRAINED)
        await changes.refresh()
        link.down = True
        await changes.set(_A, REMOVED)
        await changes.set(_B, REMOVED)
        await other.set(_A, ADDED)
        link.down = False
        await changes.refresh()
        assert changes.current == {_A: ADDED, _B: REMOVED}
        assert changes.unshared == []
        await other.refresh()
        assert other.current == changes.current
        assert await StoredChanges(store, "another fleet").read() == {}


async def test_what_was_read_before_a_change_does_not_undo_it(sqlite_url: str) -> None:
    async with opened(sqlite_url) as store:
        link = _Unreliable(store)
        changes = Changes(link)
        link.meanwhile = lambda: changes.set(_A, REMOVED)
        await changes.refresh()
        assert changes.current == {_A: REMOVED}
        link.meanwhile = None
        await changes.refresh()
        assert changes.current == {_A: REMOVED}


async def test_what_no_proxy_wrote_is_not_applied(sqlite_url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(sqlite_url) as store:
        await store.put("replicas/fleet", "http://user:secret@a:1", b"added")
        changes = Changes(StoredChanges(store, "fleet"))
        await changes.refresh()
        assert changes.current == {}
        assert "invalid URL" in caplog.text and "secret" not in caplog.text
