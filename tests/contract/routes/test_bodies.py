import json
from collections.abc import Iterator

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm
from tests.support.utils import run_proxy, send_and_keep

_LIMIT = 1000
_BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
_ROUTES = ["/v1/chat/completions/tokens", "/tokenize", "/v1/chat/completions"]


@pytest.fixture
def limited(mortal: FakeVllm) -> Iterator[httpx.Client]:
    with run_proxy([mortal], body_limit_bytes=_LIMIT) as client:
        mortal.requests.clear()
        yield client


def _pieces(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 100):
        yield body[start : start + 100]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", _ROUTES)
def test_the_limit(limited: httpx.Client, mortal: FakeVllm, path: str, chunked: bool) -> None:
    for size, status in [(_LIMIT, 200), (_LIMIT + 1, 413), (_LIMIT * 50, 413)]:
        body = _BODY.ljust(size)
        answer = limited.post(path, content=_pieces(body) if chunked else body)
        assert answer.status_code == status
        if status == 413:
            error = answer.json()["error"]
            assert (error["param"], error["code"], error["type"]) == (
                "body",
                413,
                "RequestEntityTooLargeError",
            )
            assert "body_limit_bytes" in error["message"]
    assert sum(seen.method == "POST" for seen in mortal.requests) == 1


def test_an_announced_body_is_refused_before_it_is_sent(limited: httpx.Client) -> None:
    with send_and_keep(limited.base_url, _ROUTES[0], b"", announced=_LIMIT + 1) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("path", ["/v1/chat/completions/tokens", "/tokenize"])
def test_bodies_that_are_not_objects_are_refused(client: httpx.Client, path: str) -> None:
    for body in (b"", b"{", b"[]", b"\xff"):
        answer = client.post(path, content=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body")
