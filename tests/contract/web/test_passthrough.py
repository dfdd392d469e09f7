import gzip
import random

import httpx
import pytest

from tests.support.fake_vllm import Canned, FakeVllm
from tests.support.utils import run_proxy


@pytest.mark.parametrize("method, status", [("GET", 301), ("POST", 202), ("DELETE", 500), ("HEAD", 200)])
def test_any_method_and_status_on_any_route(
    fake: FakeVllm, client: httpx.Client, method: str, status: int
) -> None:
    fake.canned["/some/a%252Fb%20c"] = Canned(b"answer", status, {"x-answer": "yes"})
    body = b"\x00body\xff" if method in ("POST", "DELETE") else b""
    target = "/some/a%252Fb%20c?a=1&b=%2F&c=%C3%A9+1"
    answer = client.request(method, target, content=body, headers={"x-question": "why"})
    seen = fake.last("/some/a%252Fb%20c")
    assert (seen.method, seen.target, seen.body) == (method, target, body)
    assert seen.header("x-question") == b"why"
    assert (answer.status_code, answer.headers["x-answer"]) == (status, "yes")
    assert answer.content == (b"" if method == "HEAD" else b"answer")
    assert answer.headers["content-length"] == "6"


def test_compressed_and_large_bodies_stay_as_they_are(fake: FakeVllm, client: httpx.Client) -> None:
    packed = gzip.compress(random.Random(7).randbytes(2**21))
    encoded = {"content-encoding": "gzip"}
    fake.canned["/anything"] = Canned(packed, 200, {"content-type": "application/json", **encoded})
    with client.stream("POST", "/anything", content=packed, headers=encoded) as answer:
        assert b"".join(answer.iter_raw()) == packed
        assert answer.headers["content-encoding"] == "gzip"
    assert fake.last("/anything").body == packed
    assert fake.last("/anything").header("content-encoding") == b"gzip"


@pytest.mark.parametrize(
    "method, path, times",
    [
        ("POST", "/v1/chat/completions", 2),
        ("POST", "/v1/embeddings?x=1", 2),
        ("POST", "/some/change", 1),
    ],
)
def test_only_requests_without_side_effects_are_sent_twice(
    mortal: FakeVllm, method: str, path: str, times: int
) -> None:
    # the proxy's own questions come seldom: one of them may have the open connection
    with run_proxy([mortal], store="memory:", watch_interval_s=60) as client:
        client.get("/version")  # leaves an open connection, which the engine may close under the next request
        # of nothing else: after a question of its own that breaks, the proxy would take the engine for dead
        mortal.requests.clear()
        mortal.hang_up = lambda seen: seen.target == path
        answer = client.request(method, path, json={"messages": []})
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "BadGatewayError")
    assert len(mortal.seen(path.partition("?")[0])) == times
