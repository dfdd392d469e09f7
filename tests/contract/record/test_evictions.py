"""Evictions are told in the log, before the first one too."""

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm
from tests.support.talk import CHAT, user
from tests.support.utils import run_proxy, wait_until
from tokenproxy.record import history
from tokenproxy.record.store import Evicted
from tokenproxy.store.sqlite import SqliteStore


def _record(client: httpx.Client, session: str) -> int:
    """Record a turn; returns the bytes that all sessions take."""
    body = {"messages": [user(f"Hello {session}")]}
    assert client.post(CHAT, json=body, headers={"x-session-id": session}).is_success
    return sum(each["bytes"] for each in client.get("/v1/sessions").json()["data"])


def test_the_log_warns_once_at_nine_tenths_and_at_each_eviction(
    mortal: FakeVllm, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "EVICTION_INTERVAL_S", 0.01)
    evict, passes = SqliteStore.evict, []

    async def counted(store: SqliteStore) -> Evicted:
        passes.append(store)
        return await evict(store)

    monkeypatch.setattr(SqliteStore, "evict", counted)

    def told(words: str) -> list[str]:
        return [each.levelname for each in caplog.records if words in each.getMessage()]

    with run_proxy([mortal], store="memory:") as client:
        one = _record(client, "s0")
    with run_proxy([mortal], store="memory:", store_max_bytes=21 * one // 2) as client:
        for number in range(8):
            assert _record(client, f"s{number}") < 9 * one
        assert not told("% of `store_max_bytes`")
        for number in range(8, 10):
            _record(client, f"s{number}")
        wait_until(lambda: told("% of `store_max_bytes`"))
        done = len(passes)
        wait_until(lambda: len(passes) > done + 2)
        assert not told("evicted ")
        _record(client, "s10")
        wait_until(lambda: told("evicted "))
    assert told("the store held more than") == told("% of `store_max_bytes`") == ["WARNING"]
