"""Large appends: memory stays bounded, small requests are served, and work whose client left ends."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm
from tests.support.serve_process import ServeProcess
from tests.support.tiny_model import END, TinyModel

_PATH = "/v1/chat/completions/tokens"
_MIB = 2**20


def _body(text: str) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"prompt_ids": [1, END], "append_messages": messages}).encode()


def _text(mib: int) -> str:
    return "hello there, what is the weather \n" * (mib * _MIB // 34)


@pytest.fixture
def proxy(request: pytest.FixtureRequest, tiny_model: TinyModel, tmp_path: Path) -> Iterator[ServeProcess]:
    """Its engine has a context of so many ids."""
    with FakeVllm(tiny_model) as engine:
        engine.max_model_len = request.param
        with ServeProcess([engine.url], tmp_path / "log", "--store", "memory:") as process:
            process.wait_ready()
            yield process


@pytest.fixture
def client(proxy: ServeProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=proxy.url, timeout=120, trust_env=False) as client:
        yield client


def _small_requests(client: httpx.Client, others: "list[Future[httpx.Response]]") -> list[float]:
    """How long small requests take until others have their answers, in seconds."""
    waits: list[float] = []
    while not all(other.done() for other in others):
        since = time.monotonic()
        answer = client.post("/tokenize", content=_body(f"Hi {len(waits)}"))
        waits.append(time.monotonic() - since)
        assert answer.status_code == 200
    return waits


@pytest.mark.parametrize("proxy", [131_072], indirect=True)  # as most models have
def test_two_appends_of_60_mib_are_refused_before_they_are_tokenised(
    proxy: ServeProcess, client: httpx.Client
) -> None:
    body, idle = _body(_text(60)), proxy.memory / _MIB
    with ThreadPoolExecutor(2) as pool:
        large = [pool.submit(client.post, _PATH, content=body) for _ in range(2)]
        waits = _small_requests(client, large)
    for answer in large:
        assert answer.result().status_code == 400
        assert "maximum context length is 131072" in answer.result().json()["error"]["message"]
    # six times each body, for the copies while it is parsed; tokenising would take 100 times its size
    assert proxy.peak_memory / _MIB - idle < 6 * 2 * 60
    # nothing holds the event loop for longer than one pass over a body; the rest is the machine's
    assert sorted(waits)[len(waits) // 2] < 0.5
    assert max(waits) < 4


@pytest.mark.parametrize("proxy", [10**9], indirect=True)  # which no text here exceeds
def test_large_texts_that_fit_are_tokenised_one_at_a_time_and_in_pieces(
    proxy: ServeProcess, client: httpx.Client
) -> None:
    text, idle = _text(4), proxy.memory / _MIB
    with ThreadPoolExecutor(2) as pool:
        large = [pool.submit(client.post, "/tokenize", content=_body(text)) for _ in range(2)]
        waits = _small_requests(client, large)
    counts = {answer.result().json()["appended"] for answer in large}
    assert len(counts) == 1
    assert counts.pop() > len(text) // 10
    assert proxy.peak_memory / _MIB - idle < 400
    assert sorted(waits)[len(waits) // 2] < 0.5
