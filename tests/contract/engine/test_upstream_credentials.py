"""A user and password in an upstream's URL: sent to the engine, shown nowhere."""

import logging
from base64 import b64encode

import pytest

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.utils import run_app, wait_until
from tokenproxy.settings import Settings

_SECRET = "p:a/ss"
_BASIC = b"Basic " + b64encode(b"basil:" + _SECRET.encode())
_BODY = {"messages": [{"role": "user", "content": "Hi"}]}


def _with_user(url: str) -> str:
    return url.replace("//", "//basil:p%3Aa%2Fss@")


def test_credentials_are_sent_and_never_shown(mortal: FakeVllm, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    settings = Settings(
        upstreams=[_with_user(mortal.url)], upstream_api_key="other", store="memory:", watch_interval_s=0.1
    )
    shown = [repr(settings), str(settings)]
    with run_app(settings) as client:
        wait_until(lambda: client.get("/ready").status_code == 200)
        mine = {"authorization": "Bearer anna", "x-session-id": "one"}
        mortal.requests.clear()
        assert client.post("/v1/chat/completions", json=_BODY, headers=mine).status_code == 200
        assert client.get("/v1/models", headers=mine).status_code == 200
        assert {seen.header("authorization") for seen in mortal.requests} == {_BASIC}
        # the engine sees the proxy's credentials, so all clients are one tenant
        assert client.get("/v1/sessions/one", headers={"authorization": "Bearer bert"}).status_code == 200
        mortal.replies.append(Reply(break_at=0, how="inside"))
        broken = client.post("/v1/chat/completions", json=_BODY)
        mortal.kill()
        wait_until(lambda: client.get("/ready").status_code == 503)
        gone = client.get("/v1/models")
        assert (broken.status_code, gone.status_code) == (502, 503)
        shown += [broken.text, gone.text, client.get("/ready").text, client.get("/metrics").text, caplog.text]
        assert mortal.url in gone.text
    for text in shown:
        for secret in ("basil", _SECRET, "p%3Aa", _BASIC.decode().split()[1]):
            assert secret not in text
