"""`X-Request-ID` from the client to the engine, to the log and back, also for requests that fail."""

import logging
import re

import httpx
import pytest

from tests.support.fake_vllm import Canned, FakeVllm, Reply
from tests.support.talk import CHAT
from tests.support.utils import EVERY_SPELLING
from tokenproxy.monitoring.exchange import LONGEST

_TOKENS = "/v1/chat/completions/tokens"
_HI = {"messages": [{"role": "user", "content": "Hi"}]}
_MINE = {"x-request-id": "mine"}
_MADE = re.compile(r"[0-9a-f]{32}")


@EVERY_SPELLING
def test_from_the_client_to_the_engine_and_back(fake: FakeVllm, client: httpx.Client) -> None:
    answer = client.post(_TOKENS, json={"prompt_ids": [1, 74]}, headers={"X-Request-ID": "run-7/step:3"})
    assert answer.headers.get_list("x-request-id") == ["run-7/step:3"]
    assert {seen.header("x-request-id") for seen in fake.generations()} == {b"run-7/step:3"}


@pytest.mark.parametrize("value", [None, "a b", "ä", 'a"b', "a" * (LONGEST + 1)])
def test_a_missing_or_unusable_id_is_replaced(
    fake: FakeVllm, client: httpx.Client, value: str | None
) -> None:
    headers = {} if value is None else {b"x-request-id": value.encode()}
    first, second = (client.post(CHAT, json=_HI, headers=headers).headers["x-request-id"] for _ in range(2))
    assert first != second and _MADE.fullmatch(first)
    sent = [each for name, each in fake.last().headers if name.lower() == b"x-request-id"]
    assert sent == [second.encode()]


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", CHAT, b"no JSON", 400),
        ("GET", "/v1/sessions/unknown", b"", 404),
        ("TRACE", "/health", b"", 405),
        ("GET", "/metrics", b"", 200),
    ],
)
def test_in_errors_and_on_other_routes(
    client: httpx.Client, method: str, path: str, content: bytes, status: int
) -> None:
    answer = client.request(method, path, content=content, headers=_MINE)
    assert (answer.status_code, answer.headers.get_list("x-request-id")) == (status, ["mine"])


def test_when_the_engine_breaks_or_returns_an_id_of_its_own(fake: FakeVllm, client: httpx.Client) -> None:
    """vLLM returns one with --enable-request-id-headers."""
    fake.replies.append(Reply(break_at=0, how="head"))
    answer = client.post(CHAT, json=_HI, headers=_MINE)
    assert (answer.status_code, answer.headers["x-request-id"]) == (502, "mine")
    fake.canned["/v1/embeddings"] = Canned(b"[1]", 200, {"X-Request-Id": "the engine's"})
    answer = client.post("/v1/embeddings", headers=_MINE)
    assert answer.headers.get_list("x-request-id") == ["mine"]


def test_in_an_unexpected_error_and_in_its_log(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("tokenproxy.web.turns.TurnRoute.answer", fail)
    answer = client.post(CHAT, json=_HI, headers=_MINE)
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
    assert list(answer.json()["error"]) == ["message", "type", "param", "code"]
    assert "secret detail" not in answer.text
    errors = [each for each in caplog.records if each.levelno == logging.ERROR]
    [record] = [each for each in errors if CHAT in each.getMessage()]
    assert record.exc_info is not None
