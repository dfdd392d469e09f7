"""What operators of the proxy rely on, before real engines: keys, addresses, stores, logs, shared changes."""

import json
import socket
import sqlite3
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from proxy.demo.stack import EngineProcess
from proxy.key_command import add_key
from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, ProxyProcess, checkpoint_with, run_proxy
from tests.campaign.real_vllm.plain import CHAT, SESSIONS, Conversation, continues, user
from tests.support.redis_server import RedisServer
from tests.support.utils import wait_until

pytestmark = [pytest.mark.timeout(START_TIMEOUT_S + 600), pytest.mark.kills_engine]

_ADMIN = "/admin/replicas"
_FEW: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
_BODY = {"messages": [user("Hi.")], **_FEW}


@pytest.fixture
def stock(engines: dict[str, EngineProcess]) -> str:
    """The URL of a stock engine."""
    return engines["stock"].url


def _replicas(http: httpx.Client) -> list[str]:
    return [each["engine"] for each in http.get(_ADMIN).json()["replicas"]]


# --- doors


def test_keys_hosts_origins_and_tls(stock: str, tmp_path: Path) -> None:
    keys, cert, private = tmp_path / "keys.yaml", tmp_path / "cert.pem", tmp_path / "key.pem"
    first = add_key(keys, "first", ["inference", "read"], None)
    _make_certificate(cert, private)
    doors = ("--api-key-file", str(keys), "--cors-origins", "https://app.example", "--store", "memory:")
    with run_proxy(stock, *doors, client_key=first) as url, httpx.Client(base_url=url, timeout=60) as http:
        bearer, api_key = {"authorization": f"Bearer {first}"}, {"x-api-key": first}
        for each in (bearer, api_key):
            assert http.post(CHAT, json=_BODY, headers=each).status_code == 200
        assert http.post(CHAT, json=_BODY).status_code == 401
        assert http.post(_ADMIN, json={"url": stock}, headers=bearer).status_code == 403
        second = add_key(keys, "second", ["inference"], None)
        wait_until(lambda: _status(http, second) == 200)
        keys.write_text(keys.read_text().partition("- name: second")[0])
        wait_until(lambda: _status(http, second) == 401)
        asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
        assert (
            http.options(CHAT, headers=asked).headers["access-control-allow-origin"] == "https://app.example"
        )
    with run_proxy(
        stock, "--allowed-hosts", "127.0.0.1", "--http-parser", "h11", "--store", "memory:"
    ) as url:
        assert httpx.post(url + CHAT, json=_BODY, timeout=60).status_code == 200
        refused = httpx.post(url + CHAT, json=_BODY, headers={"host": "evil.example"}, timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "host_not_allowed")
    _check_tls(stock, cert, private)


def _make_certificate(cert: Path, private: Path) -> None:
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    command = ["openssl", "req", "-x509", *key, *names, "-keyout", str(private), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)


def _status(http: httpx.Client, key: str) -> int:
    return http.post(CHAT, json=_BODY, headers={"authorization": f"Bearer {key}"}).status_code


def _check_tls(stock: str, cert: Path, private: Path) -> None:
    proxy = ProxyProcess(stock, "--tls-cert", str(cert), "--tls-key", str(private), "--store", "memory:")
    verified = ssl.create_default_context(cafile=str(cert))
    proxy.url = proxy.url.replace("http://", "https://")
    try:
        proxy.spawn()
        with httpx.Client(base_url=proxy.url, verify=verified, timeout=60, trust_env=False) as http:
            wait_until(lambda: _status_of(http, "/ready") == 200)
            assert http.post(CHAT, json=_BODY).status_code == 200
    finally:
        proxy.stop()


def _status_of(http: httpx.Client, path: str) -> int:
    """The status of a page; 0 while nothing listens."""
    try:
        return http.get(path).status_code
    except httpx.TransportError:
        return 0


def test_credentials_in_a_url_are_never_shown(stock: str, capfd: pytest.CaptureFixture[str]) -> None:
    secret = "s3cr3t"
    with run_proxy(stock.replace("://", f"://user:{secret}@"), "--store", "memory:") as url:
        assert httpx.post(url + CHAT, json=_BODY, timeout=60).status_code == 200
        pages = [httpx.get(url + path, timeout=30).text for path in ("/ready", "/metrics", _ADMIN)]
    assert not [page for page in pages if secret in page]
    shown = capfd.readouterr()
    assert secret not in shown.out + shown.err


# --- load


def test_a_client_that_does_not_read_holds_nobody(stock: str) -> None:
    with run_proxy(stock, "--store", "memory:") as url:
        target = urlsplit(url)
        assert target.hostname is not None
        body = json.dumps({**_BODY, "stream": True, "max_tokens": 400, "n": 4}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: proxy\r\ncontent-type: application/json\r\n"
        with closing(socket.socket()) as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            deaf.connect((target.hostname, target.port))
            deaf.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            for _ in range(3):
                assert httpx.post(url + CHAT, json=_BODY, timeout=60).status_code == 200
        with httpx.Client(base_url=url, timeout=60) as http:
            wait_until(lambda: all(each["requests"] == 0 for each in http.get(_ADMIN).json()["replicas"]))


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(stock: str) -> None:
    with run_proxy(stock, "--store", "memory:") as url, httpx.Client(base_url=url, timeout=60) as http:
        talk = Conversation(http, [])
        first = talk.ask(user("Hi."), **_FEW)
        ids = [*first.prompt_ids, *first.ids]
        long = {"prompt_ids": ids, "append_messages": [user("word " * 2_000_000)]}
        refused = http.post(f"{CHAT}/tokens", json=long)
        assert refused.status_code == 400
        assert "maximum context length" in refused.json()["error"]["message"]
        assert "at least" in refused.json()["error"]["message"]


# --- the fleet


def test_a_name_gives_one_replica_for_each_address(stock: str) -> None:
    port = urlsplit(stock).port
    with (
        run_proxy(f"dns+http://localhost:{port}", "--store", "memory:") as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        assert http.post(CHAT, json=_BODY).status_code == 200
        ready = [each for each in http.get(_ADMIN).json()["replicas"] if each["ready"]]
        assert [each["engine"] for each in ready] == [f"http://127.0.0.1:{port}"]


def test_two_proxies_share_what_an_admin_changed(stock: str, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/shared.db"
    flags = ("--store", store, "--fleet-name", "shared", "--watch-interval-s", "0.5")
    other = "http://127.0.0.1:9"
    with (
        run_proxy(stock, *flags) as one,
        run_proxy(stock, *flags) as two,
        httpx.Client(base_url=one, timeout=60) as first,
        httpx.Client(base_url=two, timeout=60) as second,
    ):
        assert first.post(_ADMIN, json={"url": other}).is_success
        wait_until(lambda: other in _replicas(second))
        assert second.delete(_ADMIN, params={"url": other}).is_success
        wait_until(lambda: other not in _replicas(first))
        assert first.post(CHAT, json=_BODY).status_code == 200


def test_an_engine_that_comes_back_with_another_model_gets_no_ids(
    model: Path, tmp_path: Path, second: EngineProcess
) -> None:
    """Its tokenizer has other ids: they would be read as other text."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["Ġthe"], vocabulary["Ġof"] = vocabulary["Ġof"], vocabulary["Ġthe"]
    folder = tmp_path / "other"
    folder.mkdir()
    other = checkpoint_with(model, folder, "tokenizer.json", tokenizer)
    with (
        run_proxy(second.url, "--store", "memory:", "--watch-interval-s", "0.5") as url,
        httpx.Client(base_url=url, timeout=120) as http,
    ):
        talk = Conversation(http, [])
        talk.ask(user("Hi."), **_FEW)
        port = urlsplit(second.url).port or 0
        second.stop()
        flags = ["--served-model-name", "another"]
        log = tmp_path / "other.log"
        with EngineProcess(other, port=port, plugin=False, extra_flags=flags, log_file=log) as returned:
            returned.wait_ready(START_TIMEOUT_S)
            wait_until(lambda: http.post(CHAT, json=_BODY).status_code == 200)
            answer = http.post(CHAT, json={**_BODY, "messages": [*talk.messages, user("And?")]})
            assert answer.status_code == 200
            assert answer.headers["x-prompt-source"] == "rendered"


def test_a_session_is_known_to_an_engine_that_records(engines: dict[str, EngineProcess]) -> None:
    """`X-Session-ID` is passed upstream: a proxy inside the engine records the same session."""
    with run_proxy(engines["plugin"].url, "--store", "memory:") as url:
        headers = {"x-session-id": "passed-on"}
        answer = httpx.post(url + CHAT, json=_BODY, headers=headers, timeout=60)
        assert (answer.status_code, answer.headers["x-session-id"]) == (200, "passed-on")
        for each in (url, engines["plugin"].url):
            assert len(httpx.get(f"{each}{SESSIONS}/passed-on", timeout=60).json()["turns"]) == 1


def test_a_proxy_starts_before_its_engine(model: Path, tmp_path: Path) -> None:
    with EngineProcess(model, plugin=False, log_file=tmp_path / "late.log") as engine:
        proxy = ProxyProcess(engine.url, "--store", "memory:", "--watch-interval-s", "0.5")
        try:
            proxy.spawn()
            with httpx.Client(base_url=proxy.url, timeout=60) as http:
                wait_until(lambda: _status_of(http, "/health") == 200)
                ready = http.get("/ready")
                assert ready.status_code == 503
                assert ready.json()["engines"][0]["problem"]
                engine.wait_ready(START_TIMEOUT_S)
                wait_until(lambda: _status_of(http, "/ready") == 200)
                assert http.post(CHAT, json=_BODY).status_code == 200
        finally:
            proxy.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_generation_outlives_short_timeouts(stock: str, stream: bool) -> None:
    long = {**_BODY, "max_tokens": 300, "stream": stream}
    with run_proxy(stock, "--idle-timeout-s", "1", "--connect-timeout-s", "1", "--store", "memory:") as url:
        began = time.monotonic()
        answer = httpx.post(url + CHAT, json=long, headers={"x-session-id": "long"}, timeout=300)
        assert time.monotonic() - began > 2
        assert answer.status_code == 200
        assert answer.text.endswith("data: [DONE]\n\n") is stream
        [turn] = httpx.get(f"{url}{SESSIONS}/long", timeout=60).json()["turns"]
        assert (turn["completion_tokens"], turn["problem"]) == (300, None)


# --- stores


def test_a_deleted_file_is_noticed(stock: str, tmp_path: Path) -> None:
    file = tmp_path / "rollouts.db"
    with (
        run_proxy(stock, "--store", f"sqlite://{file}") as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        talk = Conversation(http, [], headers={"x-session-id": "kept"})
        first = talk.ask(user("Hi."), **_FEW)
        for each in tmp_path.glob("rollouts.db*"):
            if each.is_file():
                each.unlink()
        second = talk.ask(user("And?"), **_FEW)
        wait_until(file.exists)
        wait_until(lambda: http.get("/ready").json()["store"]["state"] == "ok")
        third = talk.ask(user("Go on."), **_FEW)
        assert continues(third, second) or third.source.startswith("rendered")
        assert continues(second, first) or second.source.startswith("rendered")
        assert continues(talk.ask(user("More."), **_FEW), third)
        with closing(sqlite3.connect(file)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert connection.execute("SELECT count(*) FROM turns").fetchone()[0] >= 2


def test_a_redis_that_was_killed_comes_back(stock: str, tmp_path: Path) -> None:
    """While it is away, prompts are rendered; what was recorded meanwhile is in it afterwards."""
    server = RedisServer(tmp_path)
    server.start()
    store = f"redis://127.0.0.1:{server.port}/0"
    try:
        with run_proxy(stock, "--store", store) as url, httpx.Client(base_url=url, timeout=60) as http:
            talk = Conversation(http, [], headers={"x-session-id": "kept"})
            turns = [talk.ask(user("Hi."), **_FEW)]
            server.kill()
            turns.append(talk.ask(user("And?"), **_FEW))
            server.start()
            wait_until(lambda: http.get("/ready").json()["store"]["state"] == "ok")
            turns.append(talk.ask(user("Go on."), **_FEW))
            assert turns[1].source.startswith("rendered")
            assert continues(turns[2], turns[1])
            assert len(http.get(f"{SESSIONS}/kept").json()["turns"]) >= 2
    finally:
        server.kill()


# --- logs


@pytest.fixture
def logged(stock: str, capfd: pytest.CaptureFixture[str]) -> Iterator[list[dict[str, Any]]]:
    """The lines that a proxy logs for one request, as JSON."""
    with run_proxy(stock, "--log-format", "json", "--access-log", "--store", "memory:") as url:
        httpx.post(url + CHAT, json=_BODY, headers={"x-request-id": "seen"}, timeout=60).raise_for_status()
    lines = capfd.readouterr()
    yield [json.loads(line) for line in (lines.out + lines.err).splitlines() if line.startswith("{")]


def test_a_request_is_logged_as_json(logged: list[dict[str, Any]]) -> None:
    access = [line for line in logged if line.get("request_id") == "seen" and "status" in json.dumps(line)]
    assert access
    assert any(line.get("status") == 200 for line in access)
