"""Nothing of one tenant reaches another where only the engine checks keys."""

from typing import Any

import httpx

from proxy.settings import Settings
from tests.support.fake_vllm import FakeVllm
from tests.support.talk import Talk, user
from tests.support.tiny_model import TinyModel
from tests.support.utils import Pair, run_app, wait_until

_SESSIONS = "/v1/sessions"


def test_lists_samples_and_trees_show_only_the_tenants_sessions(tiny_model: TinyModel) -> None:
    with (
        FakeVllm(tiny_model, api_keys=("one", "two")) as engine,
        run_app(Settings(upstreams=[engine.url], store="memory:")) as client,
    ):
        # the engine tells the proxy nothing before somebody comes with a key
        wait_until(lambda: "API key" in client.get("/ready").json()["engines"][0].get("problem", ""))

        def request(key: str, method: str, path: str, **more: Any) -> httpx.Response:
            return client.request(method, path, headers={"authorization": f"Bearer {key}"}, **more)

        def ask(**headers: str) -> str:
            headers = {"authorization": "Bearer one", **headers}
            return Talk(Pair(engine, client), tiny_model, [user("Hi")], headers).ask().session

        session, named = ask(), ask(**{"x-session-id": "s"})
        shown = request("one", "GET", _SESSIONS).json()["data"]
        assert {each["id"] for each in shown} == {session, named}
        assert request("two", "GET", _SESSIONS).json()["data"] == []
        for name in (session, named):
            for method, what in (("GET", ""), ("GET", "/samples"), ("POST", "/reward"), ("DELETE", "")):
                body = {"reward": 1.0} if what == "/reward" else None
                refused = request("two", method, f"{_SESSIONS}/{name}{what}", json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (404, "session_not_found")
            assert request("one", "GET", f"{_SESSIONS}/{name}/samples").json()["samples"]
            assert request("one", "GET", f"{_SESSIONS}/{name}").json()["reward"] is None
