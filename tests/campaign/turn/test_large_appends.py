"""Large appends: memory stays bounded, small requests are served, and work whose client left ends."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.fake_vllm import Canned, FakeVllm
from tests.support.serve_process import ServeProcess
from tests.support.tiny_model import END, TinyModel

_PATH = "/v1/chat/completions/tokens"
_MIB = 2**20


def _body(text: str) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"prompt_ids": [1, END], "append_messages": messages}).encode()


def _text(mib: int) -> str:
    return "hello there, what is the weather \n" * (mib * _MIB // 34)


@dataclass(frozen=True)
class _Served:
    process: ServeProcess
    client: httpx.Client


def _proxy(model: TinyModel, log: Path, max_model_len: int) -> Iterator[_Served]:
    with FakeVllm(model) as engine:
        served = {"id": "tiny", "root": str(model.folder), "max_model_len": max_model_len}
        headers = {"content-type": "application/json"}
        engine.canned["/v1/models"] = Canned(json.dumps({"data": [served]}).encode(), headers=headers)
        with ServeProcess([engine.url], log, "--store", "memory:") as process:
            process.wait_ready()
            with httpx.Client(base_url=process.url, timeout=120, trust_env=False) as client:
                yield _Served(process, client)


@pytest.fixture
def proxy(tiny_model: TinyModel, tmp_path: Path) -> Iterator[_Served]:
    """Its engine has the context of most models."""
    yield from _proxy(tiny_model, tmp_path / "log", 131_072)


@pytest.fixture
def unlimited(tiny_model: TinyModel, tmp_path: Path) -> Iterator[_Served]:
    """Its engine has a context that no text here exceeds."""
    yield from _proxy(tiny_model, tmp_path / "log", 10**9)


def _small_requests(proxy: _Served, others: "list[Future[httpx.Response]]") -> list[float]:
    """How long small requests take until others have their answers, in seconds."""
    waits: list[float] = []
    while not all(other.done() for other in others):
        since = time.monotonic()
        answer = proxy.client.post("/tokenize", content=_body(f"Hi {len(waits)}"))
        waits.append(time.monotonic() - since)
        assert answer.status_code == 200
    return waits


def test_two_appends_of_60_mib_are_refused_before_they_are_tokenised(proxy: _Served) -> None:
    body, idle = _body(_text(60)), proxy.process.memory / _MIB
    with ThreadPoolExecutor(2) as pool:
        large = [pool.submit(proxy.client.post, _PATH, content=body) for _ in range(2)]
        waits = _small_requests(proxy, large)
    for answer in large:
        assert answer.result().status_code == 400
        assert "maximum context length is 131072" in answer.result().json()["error"]["message"]
    # each body, and copies of it while it is parsed; tokenising would take 100 times its size
    assert proxy.process.peak_memory / _MIB - idle < 10 * 60
    # nothing holds the event loop for longer than one pass over a body; the rest is the machine's
    assert sorted(waits)[len(waits) // 2] < 0.5
    assert max(waits) < 4


def test_large_texts_that_fit_are_tokenised_one_at_a_time_and_in_pieces(unlimited: _Served) -> None:
    text, idle = _text(4), unlimited.process.memory / _MIB
    with ThreadPoolExecutor(2) as pool:
        large = [pool.submit(unlimited.client.post, "/tokenize", content=_body(text)) for _ in range(2)]
        waits = _small_requests(unlimited, large)
    counts = {answer.result().json()["appended"] for answer in large}
    assert len(counts) == 1
    assert counts.pop() > len(text) // 10
    assert unlimited.process.peak_memory / _MIB - idle < 400
    assert sorted(waits)[len(waits) // 2] < 0.5
