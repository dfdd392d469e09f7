"""Paths: aliases of routes, sessions in the path, and paths that are refused."""

from collections.abc import Callable
from urllib.parse import quote

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import CHAT, Talk, user
from tests.support.tiny_model import END
from tests.support.utils import run_proxy, run_server, wait_until
from tokenproxy.app.app import create_app
from tokenproxy.settings import Settings

_HI = {"messages": [user("Hi")]}


def test_routes_of_the_engine_without_v1(client: httpx.Client, fake: FakeVllm) -> None:
    assert client.get("/models?a=%20b").json() == client.get("/v1/models").json()
    assert [seen.target for seen in fake.requests if "a=" in seen.target] == ["/v1/models?a=%20b"]


@pytest.mark.parametrize("name", ["v1", "a~b:c@d+e=f-g.h_i"])
def test_a_base_url_names_a_session(
    client: httpx.Client, fake: FakeVllm, talk: Callable[..., Talk], name: str
) -> None:
    made = talk(headers={"x-session-id": name})
    first = made.ask(reply=Reply((74, 71, 78, 78, 81, END)))
    fake.replies.append(Reply())
    body = {"messages": [*made.messages, user("more")]}
    path, headers = f"/sessions/{quote(name, safe='')}{CHAT}", {"x-session-id": "other"}
    second = client.post(path, json=body, headers=headers)  # the path wins over a header
    assert (second.headers["x-prompt-source"], second.headers["x-session-id"]) == ("extended", name)
    assert fake.last().header("x-session-id") == name.encode()
    tree = client.get(f"/sessions/{name}/v1/sessions/{name}").json()
    assert [turn["id"] for turn in tree["turns"][-2:]] == [first.turn, second.headers["x-turn-id"]]
    client.delete(f"/v1/sessions/{name}")


@pytest.mark.parametrize(("prefix", "slash"), [("/sessions/prefixed/v1", ""), ("/sessions/prefixed", "/")])
def test_routes_in_a_session(client: httpx.Client, fake: FakeVllm, prefix: str, slash: str) -> None:
    for path, body in ((CHAT, _HI), ("/v1/chat/completions/tokens", {"prompt_ids": [1, 74]})):
        answer = client.post(f"{prefix}{path[3:]}{slash}", json=body)
        assert (answer.status_code, answer.headers["x-session-id"]) == (200, "prefixed"), answer.text
    assert client.post(f"{prefix}/tokenize{slash}", json={"prompt": "Hi"}).status_code == 200
    assert client.get(f"{prefix}/models{slash}?a=%20b").json() == client.get("/v1/models").json()
    named = {seen.target for seen in fake.requests if seen.header("x-session-id") == b"prefixed"}
    assert named == {CHAT, "/tokenize", "/v1/models?a=%20b"}


@pytest.mark.parametrize("root", ["/api/v1", "/v1"])
def test_behind_a_root_path(mortal: FakeVllm, root: str) -> None:
    app = create_app(Settings(upstreams=[mortal.url], store="memory:", watch_interval_s=0.1))
    with (
        run_server(app, root_path=root) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=20) as client,
    ):
        wait_until(lambda: client.get("/ready").status_code == 200)
        assert client.post(f"/sessions/s{CHAT}", json=_HI).headers["x-session-id"] == "s"
        assert client.get("/sessions/s/v1/models").json() == client.get("/v1/models").json()
        assert client.get("/sessions/s/v1/sessions/s").json()["turn_count"] == 1
        # a method that the route does not have: the engine answers, and no scope `admin` is needed
        for path in (CHAT, CHAT.removeprefix("/v1")):
            assert client.get(path, headers={"x-forwarded-for": "192.0.2.1"}).status_code == 404


def test_a_made_session_is_used_with_its_id_as_key(mortal: FakeVllm) -> None:
    with run_proxy([mortal], session_from_key=True, store="memory:") as client:
        made = client.post("/v1/sessions", json={"overrides": {"temperature": 0.25}}).json()["id"]
        answer = client.post(CHAT, json=_HI, headers={"authorization": f"Bearer {made}"})
        assert answer.headers["x-session-id"] == made
    assert mortal.last(CHAT).json["temperature"] == 0.25


@pytest.mark.parametrize(
    "path",
    [
        *("/v1%2fsessions/q", "/v1/sessions/a%2Fb", "/v1/sessions%5cq", "/v1\\sessions"),
        *("/v1/../pause", "/v1/.%2E/pause", "/./pause", "/v1/models/..", "/sessions/s/v1/%2e%2e/pause"),
        *("/sessions/%2e%2e/v1/models", "/v1/models%00", "/v1/models%0d%0aX:%20y"),
    ],
)
def test_a_path_that_can_be_read_in_two_ways_is_refused(
    client: httpx.Client, fake: FakeVllm, path: str
) -> None:
    """Routing looks at the decoded path, the engine gets the encoded one."""
    before = len(fake.requests)
    for method in ("GET", "POST", "OPTIONS"):
        answer = client.send(httpx.Request(method, client.base_url, extensions={"target": path.encode()}))
        # no route of Starlette's matches a line break
        if "%0d" not in path or answer.status_code != 404:
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_path"), answer.text
    assert [seen.path for seen in fake.from_clients(before)] == []
