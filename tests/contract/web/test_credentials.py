"""Routes in front of an engine that verifies its clients' credentials itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fake_trained import FakeTrained, Rendezvous
from tests.support.fake_vllm import FakeVllm
from tests.support.ports import held_port
from tests.support.talk import CHAT, user
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_app, run_proxy
from tokenproxy.settings import Settings
from tokenproxy.web import credentials

_BODY: dict[str, Any] = {"messages": [user("Hi")]}


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def guarded(mortal: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """A proxy in front of an engine that asks for keys since it was found ready."""
    monkeypatch.setattr(credentials, "OPEN_S", 0.0)
    with run_proxy([mortal], store="memory:", watch_interval_s=60) as client:
        mortal.api_keys = ("anna", "bert")
        mortal.requests.clear()
        yield client


def test_turns_and_sessions_need_a_key_of_the_engine(guarded: httpx.Client, mortal: FakeVllm) -> None:
    requests: list[tuple[str, str, Any]] = [
        ("POST", CHAT, _BODY),
        ("POST", "/v1/chat/completions/tokens/", {"prompt_ids": [1, 74]}),
        ("GET", "/v1/sessions", None),
        ("POST", "/v1/sessions/s/reward", {"reward": 1}),
        ("GET", "/sessions/s/v1/sessions", None),
    ]
    for method, path, body in requests:
        for headers in ({}, _bearer("eve")):
            refused = guarded.request(method, path, json=body, headers=headers)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert refused.json()["error"]["code"] == "invalid_api_key"
    assert {seen.path for seen in mortal.requests} == {"/v1/models"}
    for method, path, body in requests:
        accepted = guarded.request(method, path, json=body, headers=_bearer("anna"))
        assert accepted.status_code in (200, 201, 404), accepted.text
        assert accepted.status_code != 404 or accepted.json()["error"]["code"] == "session_not_found"
    # the engine was asked once for each key
    sent = [seen.header("authorization") for seen in mortal.seen("/v1/models")]
    assert [value for value in sent if value] == [b"Bearer eve", b"Bearer anna"]


def test_nothing_of_a_tenant_reaches_another(guarded: httpx.Client) -> None:
    anna, bert = _bearer("anna"), _bearer("bert")
    answers = [guarded.post(CHAT, json=_BODY, headers=anna | more) for more in ({}, {"x-session-id": "s"})]
    names = {answer.headers["x-session-id"] for answer in answers}
    assert {each["id"] for each in guarded.get("/v1/sessions", headers=anna).json()["data"]} == names
    assert guarded.get("/v1/sessions", headers=bert).json()["data"] == []
    for name in names:
        for method, what in (("GET", ""), ("GET", "/samples"), ("POST", "/reward"), ("DELETE", "")):
            body = {"reward": 1.0} if what == "/reward" else None
            refused = guarded.request(method, f"/v1/sessions/{name}{what}", json=body, headers=bert)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "session_not_found")
        assert guarded.get(f"/v1/sessions/{name}", headers=anna).json()["reward"] is None


_READS = ("/v1/sessions", "/v1/sessions/s", "/v1/sessions/s/samples", "/v1/samples", "/viewer/sessions/s")
"""What a client may read of the record of a session `s`."""


def _reads(client: httpx.Client, headers: dict[str, str]) -> list[int]:
    """The statuses of all reads, of a reward and of an acknowledgement."""
    found = [client.get(path, headers=headers).status_code for path in _READS]
    bodies = {"/v1/sessions/s/reward": {"reward": 1}, "/v1/samples/ack": {"consumer": "a", "cursor": "0"}}
    return found + [
        client.post(path, json=each, headers=headers).status_code for path, each in bodies.items()
    ]


@pytest.mark.parametrize("keyed", [False, True])
def test_the_record_is_reached_while_the_fleet_is_paused(
    tiny_model: TinyModel, keyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "OPEN_S", 0.0)  # the engine is asked each time
    monkeypatch.setattr(credentials, "LAST_WORD_S", 60.0)
    keys: dict[str, Any] = {"api_key": ["secret"], "admin_key": ["admin"]} if keyed else {}
    headers, admin = (_bearer("secret"), _bearer("admin")) if keyed else ({}, {})
    with (
        FakeTrained(tiny_model, Rendezvous(1), 1) as engine,
        run_proxy([engine], store="memory:", **keys) as client,
    ):
        client.post(CHAT, json=_BODY, headers={"x-session-id": "s", **headers})
        assert client.post("/pause?mode=keep", headers=admin).status_code == 200
        assert _reads(client, headers) == [200] * 7
        assert client.post("/resume", headers=admin).status_code == 200


def test_the_record_is_reached_if_no_engine_ever_responds(
    tmp_path: Path, mortal: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By those that recorded something; on a loopback address also what has no tenant."""
    monkeypatch.setattr(credentials, "OPEN_S", 0.0)
    store = f"sqlite://{tmp_path}/x.db"
    with run_proxy([mortal], store=store) as client:
        mortal.api_keys = ("anna",)
        assert client.post(CHAT, json=_BODY, headers={"x-session-id": "s", **_bearer("anna")}).is_success
    with held_port() as port:
        for host, others in (("127.0.0.1", [200, 404, 404, 200, 404, 404, 200]), ("0.0.0.0", [503] * 7)):
            settings = Settings(upstreams=[f"http://127.0.0.1:{port}"], store=store, host=host)
            with run_app(settings) as client:
                assert _reads(client, _bearer("anna")) == [200] * 7
                assert _reads(client, _bearer("eve")) == _reads(client, {}) == others
                assert client.post(CHAT, json=_BODY, headers=_bearer("anna")).status_code == 503
        keyed = Settings(upstreams=settings.upstreams, store=store, host="0.0.0.0", api_key=["secret"])
        with run_app(keyed) as client:
            assert client.post("/v1/sessions", json={"id": "s"}, headers=_bearer("secret")).is_success
            assert _reads(client, _bearer("secret")) == [200] * 7
