"""Conversations over restarts, between processes, and with stores that fail or are full."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import Talk, user
from tests.support.tiny_model import SPLIT, TinyModel
from tests.support.utils import Pair, run_proxy, wait_until
from tokenproxy.record.store import Limits, StoreError
from tokenproxy.store.sqlite import SqliteStore


def test_two_proxies_with_one_store(mortal: FakeVllm, tiny_model: TinyModel, tmp_path: Path) -> None:
    database = f"sqlite://{tmp_path / 'rollouts.db'}"
    with run_proxy([mortal], store=database) as one, run_proxy([mortal], store=database) as two:
        made = Talk(Pair(mortal, one), tiny_model)
        first = made.ask(reply=Reply(SPLIT, message={"reasoning": "so", "content": " hello "}))
        for index in range(5):
            made.pair = Pair(mortal, (two, one)[index % 2])
            if index == 2:
                made.messages[1] = {"role": "assistant", "content": "hello"}
            answered = made.follow(user("more"), reply=Reply(SPLIT), stream=index in (1, 4))
            reason = "text_stripped" if index == 2 else ""
            assert (answered.session, answered.reason) == (first.session, reason)
        assert two.delete(f"/v1/sessions/{first.session}").status_code == 200
        made.pair = Pair(mortal, one)
        assert made.ask(user("more")).prompt["source"] == "rendered"


class _Failing:
    """A store in memory that can be made to fail."""

    def __init__(self) -> None:
        self._store = SqliteStore(None, Limits())
        self.limits, self.unreadable = self._store.limits, self._store.unreadable
        self.broken = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        found = getattr(self._store, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self.broken:
                raise StoreError("out of order")
            return await found(*args, **kwargs)

        return call


@pytest.mark.parametrize("headers", [{}, {"x-session-id": "s"}, {"idempotency-key": "k"}])
def test_requests_are_served_if_the_store_fails(
    mortal: FakeVllm, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
) -> None:
    store = _Failing()
    monkeypatch.setattr("tokenproxy.app.app.make_store", lambda url, limits: store)
    with run_proxy([mortal], store="memory:") as client:
        made = Talk(Pair(mortal, client), tiny_model, headers=headers)
        made.ask(reply=Reply(SPLIT))
        store.broken = True
        made.headers = {name: "k2" if value == "k" else value for name, value in headers.items()}
        answered = made.ask(user("more"))
        assert (answered.sent, answered.reason) == (None, "store_unavailable")
        for path in ("/v1/sessions", "/v1/sessions/s", "/v1/sessions/s/samples"):
            refused = client.get(path)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        store.broken = False
        wait_until(lambda: client.get("/ready").json()["store"]["state"] == "ok")
        made.headers = headers if "x-session-id" in headers else {}
        assert made.ask(user("more")).reason != "store_unavailable"
        made.follow(user("more"))
