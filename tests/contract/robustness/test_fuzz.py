"""Whatever clients send, the proxy answers it: no 500, no traceback, no growing memory."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from tests.contract.robustness.fuzzed import Fuzzed, fuzzed_requests
from tests.support.fake_vllm import FakeVllm, Variant, error_body
from tests.support.serve_process import ServeProcess
from tests.support.tiny_model import TinyModel
from tests.support.wire import Answer, send

pytestmark = pytest.mark.slow

_REQUESTS = {Variant.CHAT: 14_000, Variant.SCALE_OUT: 6_000}
_AT_ONCE, _SEED = 25, 1
_CACHE_BYTES = 8 * 2**20
_GROWTH_BYTES = 48 * 2**20
"""What the proxy may grow by after a quarter of the requests, when its caches are full."""
_NEVER = frozenset({500, 502, 503, 504})
"""Statuses that no request may get while the engine is well."""
_TOKENS = "/v1/chat/completions/tokens"
_HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(autouse=True)
def quiet_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own web server logs what it refuses, with a traceback."""
    monkeypatch.setattr(logging.getLogger("aiohttp.server"), "disabled", True)


class StrictVllm(FakeVllm):
    """Refuses what it cannot read with a 400, as vLLM's own validation does."""

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        try:
            return await super()._serve(request)
        except Exception as error:  # noqa: BLE001 - stands for a validation of everything
            body = error_body(f"{type(error).__name__}: {error}", "BadRequestError", None, 400)
            return web.Response(body=body, status=400, content_type="application/json")
        finally:
            self.requests.clear()

    def _refusal(self, body: dict[str, object], prompt: list[int], param: str) -> web.Response | None:
        if not isinstance(body.get("n") or 1, int) or not 0 < int(str(body.get("n") or 1)) <= 16:
            raise ValueError("n")
        return super()._refusal(body, prompt, param)


class Fuzzing:
    """A proxy process, and what it answered."""

    def __init__(self, proxy: ServeProcess, count: int) -> None:
        """`count`: how many requests it is to be sent."""
        url = httpx.URL(proxy.url)
        self.proxy = proxy
        self.count = count
        self.statuses: Counter[int] = Counter()
        self.distinct: set[int] = set()
        """Hashes of the requests."""
        self.wrong: list[str] = []
        """Requests that were answered wrongly, as they were sent, with what came back."""
        self.memory: list[int] = []
        """After each batch."""
        self._address = (url.host, url.port or 80)
        self._runner = asyncio.Runner()

    def close(self) -> None:
        """Close the event loop of the clients."""
        self._runner.close()

    def send(self, requests: list[Fuzzed]) -> None:
        """Send requests at once, and look at each answer."""
        for request, answer in zip(requests, self._runner.run(self._send(requests)), strict=True):
            self.statuses.update(answer.statuses)
            self.distinct.add(hash(request.data))
            if problem := _problem(request, answer):
                self.wrong.append(f"{problem}: {request.data[:2000]!r} got {answer.data[:500]!r}")
        self.memory.append(self.proxy.memory)

    async def _send(self, requests: list[Fuzzed]) -> list[Answer]:
        return await asyncio.gather(
            *(send(self._address, request.data, half_close=not request.complete) for request in requests)
        )


def _problem(request: Fuzzed, answer: Answer) -> str:
    """What is wrong with an answer; empty if nothing is."""
    if _NEVER.intersection(answer.statuses):
        return "the status"
    if not request.complete:
        return ""
    if not answer.statuses:
        return "no answer"
    try:
        if answer.statuses[-1] >= 400 and answer.body[:1] == b"{":
            answer.json  # noqa: B018 - it must be JSON
    except ValueError as error:
        return f"no JSON ({error})"
    return ""


@pytest.fixture(params=_REQUESTS, ids=str)
def fuzzing(request: pytest.FixtureRequest, tiny_model: TinyModel, tmp_path: Path) -> Iterator[Fuzzing]:
    flags = ["--store", f"sqlite://{tmp_path}/rollouts.db", "--cache-bytes", str(_CACHE_BYTES)]
    with (
        StrictVllm(tiny_model, request.param) as engine,
        ServeProcess([engine.url], tmp_path / "proxy.log", *flags) as proxy,
    ):
        proxy.wait_ready()
        fuzzing = Fuzzing(proxy, _REQUESTS[request.param])
        yield fuzzing
        fuzzing.close()


def test_fuzzed_requests(fuzzing: Fuzzing) -> None:
    requests = fuzzed_requests(_SEED, fuzzing.count)
    while batch := list(islice(requests, _AT_ONCE)):
        fuzzing.send(batch)
    assert fuzzing.wrong == []
    assert "Traceback" not in fuzzing.proxy.text
    assert sum(fuzzing.statuses.values()) > 0.8 * fuzzing.count
    assert len(fuzzing.distinct) > 0.7 * fuzzing.count
    assert fuzzing.statuses[200] > 0.2 * fuzzing.count
    assert fuzzing.memory[-1] - fuzzing.memory[len(fuzzing.memory) // 4] < _GROWTH_BYTES
    with httpx.Client(base_url=fuzzing.proxy.url, trust_env=False, timeout=60) as client:
        assert client.get("/ready").status_code == 200
        first = client.post(_TOKENS, json={"messages": _HI}).json()
        ids = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
        body = {"prompt_ids": ids, "append_messages": _HI}
        assert client.post(_TOKENS, json=body).json()["prompt_token_ids"][: len(ids)] == ids
    fuzzing.proxy.signal()
    assert fuzzing.proxy.wait() == 0
