"""Clients that leave and engines that die, on a real vLLM."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from proxy.demo.children import group_members
from proxy.demo.stack import EngineProcess
from tests.campaign.real_vllm.conftest import Served, every_spelling, run_proxy, wait_ready
from tests.campaign.real_vllm.test_token_route import PROMPT, ROUTE

LONG: dict[str, Any] = {"prompt_ids": PROMPT, "max_tokens": 3000, "ignore_eos": True}


def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    """Whether `condition` holds before the time is up."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return condition()


@pytest.mark.alone  # counts the requests of an engine
@every_spelling
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_client_that_leaves_aborts_the_engines_request(server: Served, stream: bool) -> None:
    """3,000 tokens take minutes on this engine: only an abort brings its running requests back to none."""
    assert eventually(lambda: server.running() == 0)

    def leave_early() -> None:
        timeout = httpx.Timeout(30, read=3)
        with httpx.Client(base_url=server.url, timeout=timeout) as http:
            if not stream:
                with pytest.raises(httpx.ReadTimeout):
                    http.post(ROUTE, json=LONG)
                return
            with http.stream("POST", ROUTE, json=LONG | {"stream": True}) as response:
                lines = response.iter_lines()
                for _ in range(20):
                    next(lines)
                time.sleep(1)

    client = threading.Thread(target=leave_early)
    client.start()
    assert eventually(lambda: server.running() >= 1)
    client.join()
    assert eventually(lambda: server.running() == 0)


def test_reasoning_is_parsed(mortal_engine: EngineProcess) -> None:
    """vLLM's reasoning parser works on the sampled ids, inside the engine and in front of it."""
    with run_proxy(mortal_engine.url) as front:
        for url in (mortal_engine.url, front):
            body = httpx.post(
                f"{url}{ROUTE}", json={"prompt_ids": PROMPT, "max_tokens": 8}, timeout=60
            ).json()
            [choice] = body["choices"]
            assert choice["message"]["reasoning"] and not choice["message"]["content"], choice
            assert body["prompt_token_ids"] == PROMPT
            assert len(choice["token_ids"]) == body["usage"]["completion_tokens"]


@pytest.mark.kills_engine
def test_engine_killed_in_mid_stream_inside_vllm(mortal_engine: EngineProcess) -> None:
    client = openai.OpenAI(base_url=f"{mortal_engine.url}/v1", api_key="none", max_retries=0, timeout=60)
    assert mortal_engine.pid is not None
    with pytest.raises(openai.APIError, match=r"(?i)engine|error"):
        for number, _ in enumerate(_stream(client)):
            if number == 5:
                os.kill(_engine_core(mortal_engine.pid), signal.SIGKILL)


@pytest.mark.kills_engine
def test_engine_killed_in_mid_stream_in_front_and_coming_back(engines: dict[str, EngineProcess]) -> None:
    """The stream ends with an error, the proxy says that no engine answers, and finds the next."""
    stock = engines["stock"]
    with run_proxy(stock.url, "--watch-interval-s", "1") as front:
        client = openai.OpenAI(base_url=f"{front}/v1", api_key="none", max_retries=0, timeout=60)
        # its core may die before its server, which then reports that itself
        with pytest.raises(openai.APIError, match=r"broke off in the middle|EngineCore"):
            for number, _ in enumerate(_stream(client)):
                if number == 5:
                    stock.stop(grace_s=0)
        assert httpx.get(f"{front}/health").status_code == 200
        assert eventually(lambda: httpx.get(f"{front}/ready").status_code == 503)
        refused = httpx.post(f"{front}{ROUTE}", json={"prompt_ids": PROMPT})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        stock.start()
        stock.wait_ready(600)
        assert wait_ready(front)["token_in"] == "chat"
        assert httpx.post(
            f"{front}{ROUTE}", json={"prompt_ids": PROMPT, "max_tokens": 1}, timeout=60
        ).is_success


def _stream(client: openai.OpenAI) -> openai.Stream[openai.types.chat.ChatCompletionChunk]:
    return client.post(
        "/chat/completions/tokens",
        body=LONG | {"stream": True},
        cast_to=openai.types.chat.ChatCompletion,
        stream=True,
        stream_cls=openai.Stream[openai.types.chat.ChatCompletionChunk],
    )


def _engine_core(group: int) -> int:
    """The process of vLLM's engine core among those of a server."""
    for pid in group_members(group):
        if "EngineCor" in Path(f"/proc/{pid}/comm").read_text():
            return pid
    raise LookupError(f"no engine core in process group {group}")
