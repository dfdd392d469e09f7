"""Whatever clients send, in every wire format, the proxy answers it: no 500, no traceback."""

import logging

import pytest

from tests.support.fuzzed import StrictVllm, send_fuzzed
from tests.support.talk import CHAT, user
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy

_COUNT, _SEED = 1200, 1
_TOKENS = f"{CHAT}/tokens"


def test_fuzzed_requests(
    tiny_model: TinyModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the engine's own web server logs what it refuses, with a traceback
    monkeypatch.setattr(logging.getLogger("aiohttp.server"), "disabled", True)
    with StrictVllm(tiny_model) as engine, run_proxy([engine], store="memory:") as client:
        outcome = send_fuzzed((client.base_url.host, client.base_url.port or 80), _SEED, _COUNT)
        assert outcome.wrong == []
        assert [record.getMessage() for record in caplog.records if record.exc_info] == []
        assert sum(outcome.statuses.values()) > 0.8 * _COUNT
        assert len(outcome.distinct) > 0.7 * _COUNT
        assert outcome.statuses[200] > 0.2 * _COUNT
        first = client.post(_TOKENS, json={"messages": [user("Hi")]}).json()
        ids = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
        body = {"prompt_ids": ids, "append_messages": [user("Hi")]}
        assert client.post(_TOKENS, json=body).json()["prompt_token_ids"][: len(ids)] == ids
