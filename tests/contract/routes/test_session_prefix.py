"""`/sessions/{id}/v1/...`: the session in the base URL."""

import secrets
from collections.abc import Callable
from urllib.parse import quote

import httpx
import pytest

from proxy.app import create_app
from proxy.settings import Settings
from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import CHAT, Talk, user
from tests.support.tiny_model import END, TinyModel
from tests.support.utils import run_proxy, run_server, wait_until

Make = Callable[..., Talk]
SPLIT = (74, 71, 78, 78, 81, END)
_HI = [user("Hi")]


@pytest.mark.parametrize("name", ["v1", "sessions", "a~b:c@d+e=f-g.h_i"])
def test_a_base_url_is_a_header(client: httpx.Client, fake: FakeVllm, talk: Make, name: str) -> None:
    made = talk(headers={"x-session-id": name})
    first = made.ask(reply=Reply(SPLIT))
    fake.replies.append(Reply())
    body = {"messages": [*made.messages, user("more")]}
    second = client.post(f"/sessions/{quote(name, safe='')}{CHAT}", json=body)
    assert (second.headers["x-prompt-source"], second.headers["x-session-id"]) == ("extended", name)
    assert fake.last().header("x-session-id") == name.encode()
    tree = client.get(f"/sessions/{name}/v1/sessions/{name}").json()
    assert [turn["id"] for turn in tree["turns"][-2:]] == [first.turn, second.headers["x-turn-id"]]
    client.delete(f"/v1/sessions/{name}")


@pytest.mark.parametrize("name", ["s", "v1", "v1.v1"])
def test_other_routes_pass_through(client: httpx.Client, fake: FakeVllm, name: str) -> None:
    answer = client.get(f"/sessions/{name}/v1/models?a=%20b")
    assert answer.json() == client.get("/v1/models").json()
    assert fake.seen("/v1/models")[0].target == "/v1/models?a=%20b"
    assert fake.seen("/v1/models")[0].header("x-session-id") == name.encode()


def test_the_path_wins_over_a_header(client: httpx.Client) -> None:
    one, two = f"one-{secrets.token_hex(4)}", f"two-{secrets.token_hex(4)}"
    answer = client.post(f"/sessions/{one}{CHAT}", json={"messages": _HI}, headers={"x-session-id": two})
    assert answer.headers["x-session-id"] == one


@pytest.mark.parametrize("bad", ["a%20b", "%C3%A9", "a" * 201])
def test_names_that_are_none(client: httpx.Client, bad: str) -> None:
    answer = client.post(f"/sessions/{bad}{CHAT}", json={"messages": _HI})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session")


@pytest.mark.parametrize("path", [CHAT, "/v1/sessions", "/v1/models"])
def test_an_api_key_guards_the_prefix_too(tiny_model: TinyModel, path: str) -> None:
    with FakeVllm(tiny_model) as engine, run_proxy([engine], api_key="secret", store="memory:") as client:
        method, body = ("POST", {"messages": _HI}) if path == CHAT else ("GET", None)
        for authorization, status in [("", 401), ("Bearer other", 401), ("Bearer secret", 200)]:
            headers = {"authorization": authorization}
            assert (
                client.request(method, f"/sessions/s{path}", json=body, headers=headers).status_code == status
            )
        before = len(engine.requests)
        for url in (f"//sessions/s{path}", f"/sessions/s%2f..{path}", f"/sessions/s/v1/..{path}"):
            assert client.request(method, url, json=body).status_code >= 400
        assert [seen.path for seen in engine.requests[before:] if seen.path == path] == []


@pytest.mark.parametrize("root", ["/api", "/api/v1"])
def test_behind_a_root_path(tiny_model: TinyModel, root: str) -> None:
    with FakeVllm(tiny_model) as engine:
        app = create_app(Settings(upstreams=[engine.url], store="memory:", watch_interval_s=0.1))
        with run_server(app, root_path=root) as url, httpx.Client(base_url=url, trust_env=False) as client:
            wait_until(lambda: client.get("/ready").status_code == 200)
            answer = client.post(f"/sessions/s{CHAT}", json={"messages": _HI})
            assert answer.headers["x-session-id"] == "s"
            assert client.get("/sessions/s/v1/models").json() == client.get("/v1/models").json()
            assert client.get("/sessions/s/v1/sessions/s").json()["turn_count"] == 1
