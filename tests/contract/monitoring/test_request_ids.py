"""`X-Request-ID` from the client to the engine, to the log and back, also for requests that fail."""

import logging
import re

import httpx
import pytest

from proxy.monitoring.request_ids import LONGEST, request_id
from tests.support.fake_vllm import Canned, FakeVllm, Reply
from tests.support.talk import CHAT
from tests.support.tiny_model import TinyModel
from tests.support.utils import EVERY_SPELLING, run_proxy

_TOKENS = "/v1/chat/completions/tokens"
_HI = {"messages": [{"role": "user", "content": "Hi"}]}
_MADE = re.compile(r"[0-9a-f]{32}")


@EVERY_SPELLING
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, body", [(CHAT, _HI), (_TOKENS, {"prompt_ids": [1, 74]})])
def test_from_the_client_to_the_engine_and_back(
    fake: FakeVllm, client: httpx.Client, path: str, body: dict[str, object], stream: bool
) -> None:
    answer = client.post(path, json={**body, "stream": stream}, headers={"X-Request-ID": "run-7/step:3"})
    assert answer.headers.get_list("x-request-id") == ["run-7/step:3"]
    generating = [seen for seen in fake.requests if seen.path in (CHAT, "/inference/v1/generate")]
    assert {seen.header("x-request-id") for seen in generating} == {b"run-7/step:3"}


def test_id_is_created_if_the_client_sends_none(fake: FakeVllm, client: httpx.Client) -> None:
    ids = [client.post(CHAT, json=_HI).headers["x-request-id"] for _ in range(3)]
    assert all(_MADE.fullmatch(each) for each in ids)
    assert len(set(ids)) == 3
    assert fake.last().header("x-request-id") == ids[-1].encode()


_UNUSABLE = ["", "a b", "a\tb", "ä", 'a"b', "a" * (LONGEST + 1), "a;b", "<script>", "a,b", "{}", "a\\nb"]


@pytest.mark.parametrize("value", _UNUSABLE)
def test_unusable_id_is_replaced(fake: FakeVllm, client: httpx.Client, value: str) -> None:
    answer = client.post(CHAT, json=_HI, headers={b"x-request-id": value.encode()})
    assert answer.status_code == 200
    assert _MADE.fullmatch(answer.headers["x-request-id"])
    sent = [each for name, each in fake.last().headers if name.lower() == b"x-request-id"]
    assert sent == [answer.headers["x-request-id"].encode()]


def test_longest_allowed_id_is_kept() -> None:
    longest = b"a" * LONGEST
    assert request_id([(b"x-request-id", longest)]) == longest.decode()


def test_of_several_the_first_usable_counts() -> None:
    headers = [(b"x-request-id", b"a b"), (b"x-request-id", b"first"), (b"x-request-id", b"second")]
    assert request_id(headers) == "first"


@pytest.mark.parametrize(
    "method, path, content, status",
    [
        ("POST", CHAT, b"no JSON", 400),
        ("GET", "/v1/sessions/unknown", b"", 404),
        ("GET", "/v1/nothing", b"", 404),
        ("POST", "/sessions/s/unknown", b"", 404),
        ("TRACE", "/health", b"", 405),
        ("GET", "/health", b"", 200),
        ("GET", "/metrics", b"", 200),
    ],
)
def test_in_errors_and_on_other_routes(
    client: httpx.Client, method: str, path: str, content: bytes, status: int
) -> None:
    answer = client.request(method, path, content=content, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers.get_list("x-request-id")) == (status, ["mine"])


def test_where_a_key_is_missing(tiny_model: TinyModel) -> None:
    with FakeVllm(tiny_model) as fake, run_proxy([fake], api_key=["k"], store="memory:") as client:
        answer = client.post(CHAT, json=_HI, headers={"x-request-id": "mine"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (401, "mine")


def test_when_the_engine_breaks(fake: FakeVllm, client: httpx.Client) -> None:
    fake.replies.append(Reply(break_at=0, how="head"))
    answer = client.post(CHAT, json=_HI, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (502, "mine")


def test_in_an_unexpected_error_and_in_its_log(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("proxy.routes.turns.TurnRoute.answer", fail)
    answer = client.post(CHAT, json=_HI, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
    assert "secret detail" not in answer.text
    [record] = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert CHAT in record.getMessage() and record.exc_info is not None


def test_id_returned_by_the_engine_is_replaced(fake: FakeVllm, client: httpx.Client) -> None:
    """As vLLM does with --enable-request-id-headers."""
    fake.canned["/v1/embeddings"] = Canned(b"[1]", 200, {"X-Request-Id": "the engine's"})
    answer = client.post("/v1/embeddings", headers={"x-request-id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["mine"]
