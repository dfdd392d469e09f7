"""Twenty thousand fuzzed requests to a proxy process: no 500, no traceback, no growing memory."""

import logging
from pathlib import Path

import httpx
import pytest

from tests.support.fake_vllm import Variant
from tests.support.fuzzed import StrictVllm, send_fuzzed
from tests.support.serve_process import ServeProcess
from tests.support.tiny_model import TinyModel

_GROWTH_BYTES = 48 * 2**20
"""What the proxy may grow by after a quarter of the requests, when its caches are full."""


@pytest.mark.parametrize("variant, count", [(Variant.CHAT, 14_000), (Variant.SCALE_OUT, 6_000)])
def test_fuzzed_requests(
    variant: Variant, count: int, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the engine's own web server logs what it refuses, with a traceback
    monkeypatch.setattr(logging.getLogger("aiohttp.server"), "disabled", True)
    flags = ["--store", f"sqlite://{tmp_path}/rollouts.db", "--cache-bytes", str(8 * 2**20)]
    with (
        StrictVllm(tiny_model, variant) as engine,
        ServeProcess([engine.url], tmp_path / "proxy.log", *flags) as proxy,
    ):
        proxy.wait_ready()
        url, memory = httpx.URL(proxy.url), list[int]()
        address = (url.host, url.port or 80)
        outcome = send_fuzzed(address, 1, count, lambda: memory.append(proxy.memory))
        assert outcome.wrong == []
        assert "Traceback" not in proxy.text
        assert len(outcome.distinct) > 0.7 * count
        assert memory[-1] - memory[len(memory) // 4] < _GROWTH_BYTES
        assert httpx.get(f"{proxy.url}/ready", trust_env=False).status_code == 200
        proxy.signal()
        assert proxy.wait() == 0
