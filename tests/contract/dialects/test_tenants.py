"""Nothing of one tenant reaches another: in matching, lists, samples, rewards, retries."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from proxy.settings import Settings
from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import Talk, user
from tests.support.tiny_model import SPLIT, TinyModel
from tests.support.utils import Pair, run_app, run_proxy, wait_until

_SESSIONS = "/v1/sessions"


@dataclass
class Tenants:
    """Two callers of one proxy, each with a key."""

    pair: Pair
    model: TinyModel

    def talk(self, key: str, session: str | None = None) -> Talk:
        named = {"x-session-id": session} if session else {}
        return Talk(self.pair, self.model, [user("Hi")], headers={"authorization": f"Bearer {key}", **named})

    def request(self, key: str, method: str, path: str, **more: Any) -> httpx.Response:
        return self.pair.client.request(method, path, headers={"authorization": f"Bearer {key}"}, **more)


@pytest.fixture(params=["the proxy", "the engine"])
def tenants(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Iterator[Tenants]:
    """Keys that the proxy checks, or that only the engine does."""
    keys = ("one", "two")
    if request.param == "the proxy":
        settings: Any = {"store": "memory:", "api_key": list(keys)}
        with FakeVllm(tiny_model) as engine, run_proxy([engine], **settings) as client:
            yield Tenants(Pair(engine, client), tiny_model)
        return
    with (
        FakeVllm(tiny_model, api_keys=keys) as engine,
        run_app(Settings(upstreams=[engine.url], store="memory:")) as client,
    ):
        # the engine tells the proxy nothing before somebody comes with a key
        wait_until(lambda: "API key" in client.get("/ready").json()["engines"][0].get("problem", ""))
        yield Tenants(Pair(engine, client), tiny_model)


def test_lists_samples_and_trees_show_only_the_tenants_sessions(tenants: Tenants) -> None:
    session = tenants.talk("one").ask(reply=Reply(SPLIT)).session
    named = tenants.talk("one", "s").ask(reply=Reply(SPLIT)).session
    shown = tenants.request("one", "GET", _SESSIONS).json()["data"]
    assert {each["id"] for each in shown} == {session, named}
    assert tenants.request("two", "GET", _SESSIONS).json()["data"] == []
    for name in (session, named):
        for method, what in (("GET", ""), ("GET", "/samples"), ("POST", "/reward"), ("DELETE", "")):
            body = {"reward": 1.0} if what == "/reward" else None
            refused = tenants.request("two", method, f"{_SESSIONS}/{name}{what}", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "session_not_found")
        assert tenants.request("one", "GET", f"{_SESSIONS}/{name}/samples").json()["samples"]
        assert tenants.request("one", "GET", f"{_SESSIONS}/{name}").json()["reward"] is None


def test_overrides_and_rewards_stay_with_their_tenant(tenants: Tenants) -> None:
    for key, seed in (("one", 1), ("two", 2)):
        tenants.request(key, "POST", _SESSIONS, json={"id": "s", "overrides": {"seed": seed}})
        tenants.talk(key, "s").ask()
        assert tenants.pair.fake.last().json["seed"] == seed
        tenants.request(key, "POST", f"{_SESSIONS}/s/reward", json={"reward": seed})
    for key, seed in (("one", 1), ("two", 2)):
        (sample,) = tenants.request(key, "GET", f"{_SESSIONS}/s/samples").json()["samples"]
        assert sample["reward"] == seed
