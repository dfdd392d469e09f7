"""A stream says something while the engine is silent, because clients give up."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fake_vllm import Canned, FakeVllm, Reply, error_body
from tests.support.scraping import Scrape
from tests.support.talk import user
from tests.support.tiny_model import TinyModel
from tests.support.utils import Pair, run_proxy, wait_until

_BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "messages": [user("Hi")], "stream": True}
_SILENCE_S = 0.2


@pytest.fixture
def impatient(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr("proxy.routes.turns._SILENCE_S", _SILENCE_S)
    with FakeVllm(tiny_model) as fake, run_proxy([fake], store="memory:") as client:
        yield Pair(fake, client)


def _names(text: str) -> list[str]:
    return [event.split("\n")[0].removeprefix("event: ") for event in text.split("\n\n")[:-1]]


def test_pings_between_chunks(impatient: Pair) -> None:
    impatient.fake.replies.append(Reply(hold_at=2))
    with impatient.client.stream("POST", "/v1/messages", json=_BODY) as response:
        lines = response.iter_lines()
        while next(lines) != "event: ping":
            pass
        assert json.loads(next(lines).removeprefix("data: ")) == {"type": "ping"}
        impatient.fake.release()
        assert "event: message_stop" in list(lines)


def test_a_stream_begins_before_a_slow_engine_responds(impatient: Pair) -> None:
    impatient.fake.slow_s["/v1/chat/completions"] = 3 * _SILENCE_S
    began = time.monotonic()
    with impatient.client.stream("POST", "/v1/messages", json=_BODY) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: message_start"
        assert time.monotonic() - began < 3 * _SILENCE_S
        text = "\n".join(["event: message_start", *lines]) + "\n"
    names = [name for name in _names(text) if name != "ping"]
    assert names.count("message_start") == names.count("message_delta") == 1
    assert names[-1] == "message_stop"


def test_an_error_after_the_stream_began(impatient: Pair) -> None:
    impatient.fake.slow_s["/v1/chat/completions"] = 3 * _SILENCE_S
    canned = Canned(error_body("no", "X", None, 400), 400, {"content-type": "application/json"})
    impatient.fake.replies.append(Reply(error=canned))
    text = impatient.client.post("/v1/messages", json=_BODY).text
    names = [name for name in _names(text) if name != "ping"]
    assert names == ["message_start", "error"]
    assert '"type":"invalid_request_error","message":"no"' in text


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_slow_request_ends_for_its_replica(impatient: Pair, path: str) -> None:
    """A stream that began before the engine responded closes the engine's response at its end."""
    impatient.fake.slow_s["/v1/chat/completions"] = 3 * _SILENCE_S
    body = {**_BODY, "input": "Hi"}
    assert impatient.client.post(path, json=body).status_code == 200
    wait_until(lambda: Scrape(impatient.client).value("replica_requests_in_flight") == 0)
