"""Aliases: every route of the proxy without `/v1`, with a trailing slash, and both."""

import json
from typing import Any

import httpx
import pytest

from proxy.routes.paths import engine_path, fill, other_paths
from proxy.routes.routes import all_routes
from proxy.routes.session_prefix import WITHOUT_V1
from tests.support.fake_vllm import Canned, FakeVllm, Reply
from tests.support.talk import GENERATE

_MESSAGE = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
_BODIES: dict[str, Any] = {
    "/v1/messages": _MESSAGE,
    "/v1/messages/count_tokens": _MESSAGE,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/chat/completions/tokens": {"prompt_ids": [1, 74]},
    "/v1/completions": {"prompt": [1, 74]},
    "/inference/v1/generate": {"token_ids": [1, 74], "sampling_params": {}},
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/compact": {"input": "Hi"},
    "/tokenize": {"prompt": "hello"},
    "/v1/sessions/{session}/reward": {"reward": 1},
    "/generate": {"prompts": [[1, 74]]},
    "/chat": {"messages": [[{"role": "user", "content": "Hi"}]]},
    "/v1/samples/ack": {"consumer": "aliased", "cursor": "0"},
}
_QUERIES = {"/finish_session": {"session_id": "aliased"}}
_BAD = {
    "/viewer/sessions/{session}/tokens",  # the session has no turn
    "/viewer/sessions/{session}/drift",
}
_OURS = [route for route in all_routes() if not route.catches_all]
_ALIASES = [
    pytest.param(method, route.path, alias, id=f"{method} {alias}")
    for route in _OURS
    for alias in route.aliases
    for method in route.methods
    if method != "DELETE"
    # other tests use the same proxy, whose only replica must stay
    if method == "GET" or not route.path.startswith("/admin/")
    # which must not be paused either; tests/routes/test_scopes.py tries one
    if not route.replaces_engine_route
]


@pytest.mark.parametrize(
    "path, under_v1, expected",
    [
        ("/v1/sessions", False, ["/sessions", "/v1/sessions/", "/sessions/"]),
        ("/tokenize", True, ["/v1/tokenize", "/tokenize/", "/v1/tokenize/"]),
        ("/health", False, ["/health/"]),
    ],
)
def test_other_paths(path: str, under_v1: bool, expected: list[str]) -> None:
    assert other_paths(path, under_v1=under_v1) == expected


def test_every_route_has_aliases_and_no_two_share_one() -> None:
    paths = [path for route in _OURS for path in (route.path, *route.aliases)]
    assert len(set(paths)) == len(paths)
    assert [route.path for route in _OURS if not route.aliases] == [
        "/viewer",  # its files are named relative to it
        "/viewer/",
        "/",
    ]


def test_a_template_is_filled_percent_encoded() -> None:
    assert (
        fill("/v1/sessions/{session}/samples", {"session": "a~b:c@d+e=f"})
        == "/v1/sessions/a~b:c@d+e=f/samples"
    )
    assert fill("/v1/sessions/{session}", {"session": "a/é"}) == "/v1/sessions/a%2F%C3%A9"


@pytest.mark.parametrize("method, path, alias", _ALIASES)
def test_an_alias_answers_as_the_route_does(
    client: httpx.Client, fake: FakeVllm, method: str, path: str, alias: str
) -> None:
    fake.canned[GENERATE] = Canned(b'{"choices":[]}', headers={"content-type": "application/json"})
    client.post("/v1/sessions", json={"id": "aliased"})
    response = client.post("/v1/responses", json={"input": "Hi"}).json()["id"]
    body = _BODIES.get(path)
    answers = [
        client.request(
            method,
            where.replace("{session}", "aliased")
            .replace("{response_id}", response)
            .replace("{file}", "main.js"),
            json=body,
            params=_QUERIES.get(path),
            follow_redirects=False,
        )
        for where in (path, alias)
    ]
    expected = 201 if (method, path) == ("POST", "/v1/sessions") else 200
    expected = 400 if path in _BAD else expected
    assert [answer.status_code for answer in answers] == [expected] * 2, answers[1].text
    if method != "HEAD" and answers[0].headers["content-type"] == "application/json":
        found, expected = (answer.json() for answer in answers)
        assert [*found] == [*expected] if isinstance(found, dict) else found == expected


def test_a_session_is_deleted_by_an_alias(client: httpx.Client) -> None:
    client.post("/sessions/", json={"id": "short-lived"})
    assert client.delete("/sessions/short-lived/").json()["deleted"] is True
    assert client.get("/v1/sessions/short-lived").status_code == 404


@pytest.mark.parametrize("name", ["v1", "sessions", "samples", "chat"])
def test_sessions_named_like_parts_of_paths(client: httpx.Client, name: str) -> None:
    client.post("/v1/sessions", json={"id": name})
    for path in (f"/sessions/{name}", f"/v1/sessions/{name}/", f"/sessions/{name}/samples"):
        assert client.get(path).json()["id"] == name
    assert client.delete(f"/sessions/{name}").status_code == 200


@pytest.mark.parametrize("alias", ["/chat/completions", "/v1/chat/completions/", "/chat/completions/"])
def test_the_engine_sees_the_canonical_path(client: httpx.Client, fake: FakeVllm, alias: str) -> None:
    client.post(f"{alias}?a=1", json=_BODIES["/v1/chat/completions"])
    assert [seen.path for seen in fake.requests if seen.method == "POST"] == ["/v1/chat/completions"]


def test_the_log_has_the_canonical_path(
    client: httpx.Client, fake: FakeVllm, caplog: pytest.LogCaptureFixture
) -> None:
    fake.replies.append(Reply(break_at=1))
    body = {**_BODIES["/v1/chat/completions"], "stream": True}
    client.post("/chat/completions/?a=1", json=body)
    assert "a stream of /v1/chat/completions?a=1 ends with an error" in caplog.text


def test_a_query_reaches_the_route(client: httpx.Client) -> None:
    assert client.get("/sessions/?limit=0").json()["error"]["param"] == "limit"


# --- the engine's own routes, in front


@pytest.mark.parametrize(
    "path, expected",
    [
        ("/models", "/v1/models"),
        ("/models/", "/v1/models"),
        ("/v1/models/", "/v1/models"),
        ("/models/a%2Fb", "/v1/models/a%2Fb"),
        ("/completions", "/v1/completions"),
        ("/embeddings", "/v1/embeddings"),
        ("/responses", "/v1/responses"),
        ("/responses/resp_1/cancel/", "/v1/responses/resp_1/cancel"),
        ("/messages", "/v1/messages"),
        ("/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/audio/transcriptions", "/v1/audio/transcriptions"),
        ("/chat/completions/batch", "/v1/chat/completions/batch"),
        ("/v1/detokenize", "/detokenize"),
        ("/v1/detokenize/", "/detokenize"),
        ("/detokenize/", "/detokenize"),
        ("/v1/models", "/v1/models"),
        ("/v1", "/v1"),
        ("/v1/", "/v1/"),
        ("/", "/"),
        ("", ""),
        ("*", "*"),
        ("/score", "/score"),
        ("/v1/score", "/v1/score"),
        ("/rerank", "/rerank"),
        ("/pause", "/pause"),
        ("/some/where/", "/some/where/"),
        ("/v1/some/where/", "/v1/some/where/"),
        ("/modelsx", "/modelsx"),
        ("/v1/detokenize/x", "/v1/detokenize/x"),
        ("//models", "//models"),
        ("/v2/models", "/v2/models"),
    ],
)
def test_engine_path(path: str, expected: str) -> None:
    assert engine_path(path) == expected


def test_routes_of_the_engine_without_v1(client: httpx.Client, fake: FakeVllm) -> None:
    assert client.get("/models?a=%20b").json() == client.get("/v1/models").json()
    assert [seen.target for seen in fake.requests if "a=" in seen.target] == ["/v1/models?a=%20b"]
    fake.canned["/detokenize"] = Canned(b'{"prompt": "Hi"}')
    assert client.post("/v1/detokenize", json={"tokens": [1]}).json() == {"prompt": "Hi"}


# --- with a session in the path


def test_no_path_of_a_session_has_two_meanings() -> None:
    aliases = [alias.split("/") for route in _OURS for alias in route.aliases]
    following = {parts[3] for parts in aliases if parts[1:3] == ["sessions", "{session}"] and len(parts) > 3}
    assert following == {"", "samples", "traces", "reward", "end"}
    assert following.isdisjoint({*WITHOUT_V1, "v1"})


@pytest.mark.parametrize("prefix", ["/sessions/prefixed/v1", "/sessions/prefixed"])
@pytest.mark.parametrize("slash", ["", "/"])
def test_routes_in_a_session(client: httpx.Client, fake: FakeVllm, prefix: str, slash: str) -> None:
    for path in ("/v1/chat/completions", "/v1/chat/completions/tokens"):
        answer = client.post(f"{prefix}{path[3:]}{slash}", json=_BODIES[path])
        assert (answer.status_code, answer.headers["x-session-id"]) == (200, "prefixed"), answer.text
    assert client.post(f"{prefix}/tokenize{slash}", json={"prompt": "Hi"}).status_code == 200
    assert client.get(f"{prefix}/models{slash}").json() == client.get("/v1/models").json()
    assert {seen.path for seen in fake.requests if seen.header("x-session-id")} == {
        *("/v1/chat/completions", "/tokenize", "/v1/models")
    }


@pytest.mark.parametrize("path", ["turns", "v1", "pause", "sessions", "x/y"])
def test_an_unknown_route_of_a_session(client: httpx.Client, fake: FakeVllm, path: str) -> None:
    answer = client.get(f"/sessions/s/{path}")
    assert answer.status_code == 404
    assert "the base URL of a session is /sessions/s/v1" in json.loads(answer.content)["error"]["message"]
    assert [seen for seen in fake.requests if seen.path.startswith("/sessions")] == []


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
@pytest.mark.parametrize(
    "path",
    [
        "/v1%2fsessions/q",
        "/v1%2Fsessions%2Fq",
        "/v1/sessions/a%2Fb",
        "/v1/sessions%5cq",
        "/v1\\sessions",
        "/v1/../pause",
        "/v1/%2e%2e/pause",
        "/v1/.%2E/pause",
        "/./pause",
        "/v1/models/..",
        "/sessions/s%2Fv1/a/b",
        "/sessions/s/v1/a%2Fb",
        "/sessions/s/v1/%2e%2e/pause",
        "/sessions/%2e%2e/v1/models",
        "/v1/models%00",
        "/v1/models%0d%0aX: y",
    ],
)
def test_a_path_that_can_be_read_in_two_ways_is_refused(
    client: httpx.Client, fake: FakeVllm, method: str, path: str
) -> None:
    """Routing looks at the decoded path, the engine gets the encoded one."""
    sent = httpx.Request(method, client.base_url, extensions={"target": path.replace(" ", "%20").encode()})
    before = len(fake.requests)
    answer = client.send(sent)
    if path == "/v1/models%0d%0aX: y":  # no route of Starlette's matches a line break
        assert answer.status_code in (400, 404)
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_path"), answer.text
    assert [seen.path for seen in fake.requests[before:] if "health" not in seen.path] == []


@pytest.mark.parametrize("path", ["/v1/a%252fb", "/v1/a%252e%252e/b", "/v1/a..b/...", "/v1/~a;b=c"])
def test_routed_path_equals_forwarded_path(client: httpx.Client, fake: FakeVllm, path: str) -> None:
    """Nothing is decoded a second time."""
    sent = httpx.Request("GET", client.base_url, extensions={"target": path.encode()})
    before = len(fake.requests)
    assert client.send(sent).status_code == 404
    assert [seen.path for seen in fake.requests[before:] if seen.path != "/health"] == [path]
