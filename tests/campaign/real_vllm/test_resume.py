"""Conversations on two engines: updates abort their turns, and one engine is killed twice.

No client notices: each conversation ends, without an error or a break, and each is one exact rollout.
Eighteen are those of SDKs, two of Claude Code and Codex, unmodified. With more, two cores would spend the
time between two updates with prompts alone.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.campaign.agents.installed import CLAUDE, CODEX, needs, run_command
from tests.campaign.agents.recorded import check_tree
from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, start_engine, wait_ready
from tests.campaign.real_vllm.test_coding_agents import NO_THINKING, OVERRIDES, claude_turns, codex_turns
from tests.support.recorded import record_of
from tests.support.serve_process import ServeProcess
from tests.support.talk import add_delta, user
from tests.support.utils import wait_until
from tokenproxy.client import Client
from tokenproxy.demo import EngineStartError
from tokenproxy.demo.stack import EngineProcess

_CONVERSATIONS, _TURNS, _TOKENS = 18, 6, 80
_UPDATE_EVERY_S, _OFTEN_S = 6.0, 3.0
_KILLS_AFTER_S = (8.0, 45.0)
_SAMPLED = 20
"""Ids that the engine samples after an update before it is killed."""
_PAUSE = {"mode": "abort", "clear_cache": "false"}
_DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
_FLAGS = ("--enable-scale-out", "--gpu-memory-utilization", "0.25")
_PARAMETERS = {"type": "object", "properties": {"where": {"type": "string"}}}
_TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": _PARAMETERS}}
_WORDS = ("Tell a long story.", "Go on.", "And then?", "Why?", "Go  on, please.\n", "Größer, 日本語 🙂?")


def _chat(url: str, name: str, stream: bool) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0)
    messages: list[Any] = []
    for word in _WORDS:
        messages.append(user(f"{word} {name}"))
        body: Any = {"model": "smollm2", "messages": messages, "tools": [_TOOL], "max_tokens": _TOKENS}
        headers = {"x-session-id": name}
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        if not stream:
            [choice] = client.chat.completions.create(**body, extra_headers=headers).choices
            message |= choice.message.model_dump(exclude_none=True)
        else:
            for chunk in client.chat.completions.create(**body, extra_headers=headers, stream=True):
                for piece in chunk.choices:
                    add_delta(message, piece.delta.model_dump(exclude_none=True))
        messages.append(message)
        results = [(call["id"], "A tree.") for call in message.get("tool_calls", ())]
        messages += [{"role": "tool", "tool_call_id": call, "content": text} for call, text in results]


def _messages(url: str, name: str, stream: bool) -> None:
    client = Anthropic(base_url=f"{url}/sessions/{name}", api_key="none", timeout=600, max_retries=0)
    messages: list[Any] = []
    for word in _WORDS:
        last = messages[-1]["content"] if messages else []
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "A tree."}
            for block in last
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": f"{word} {name}"}]})
        tools: Any = [{"name": "look", "input_schema": _PARAMETERS}]
        body: Any = {"model": "smollm2", "messages": messages, "tools": tools, "max_tokens": _TOKENS}
        if not stream:
            answer = client.messages.create(**body)
        else:
            with client.messages.stream(**body) as events:
                answer = events.get_final_message()
        messages.append({"role": "assistant", "content": answer.content})


def _responses(url: str, name: str, stream: bool) -> None:
    client = OpenAI(base_url=f"{url}/sessions/{name}/v1", api_key="none", timeout=600, max_retries=0)
    items: list[Any] = []
    tools: Any = [{"type": "function", "name": "look", "parameters": _PARAMETERS, "strict": False}]
    for word in _WORDS:
        items.append(user(f"{word} {name}"))
        body: Any = {"model": "smollm2", "input": items, "tools": tools, "max_output_tokens": _TOKENS}
        body |= {"store": False}
        if not stream:
            answer = client.responses.create(**body)
        else:
            *_, last = client.responses.create(**body, stream=True)
            assert last.type in ("response.completed", "response.incomplete"), last
            answer = last.response
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": "A tree."} for call in calls
        ]


_KINDS: tuple[Callable[[str, str, bool], None], ...] = (_chat, _messages, _responses)


@pytest.fixture
def fleet(model: Path, tmp_path: Path) -> Iterator[tuple[list[EngineProcess], str]]:
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                start_engine(
                    model, tmp_path / f"{number}.log", *_FLAGS, plugin=False, environment=_DEVELOPMENT
                )
            )
            for number in range(2)
        ]
        for engine in engines:
            engine.wait_ready(START_TIMEOUT_S)
        flags = ("--resume", "all", "--store", f"sqlite://{tmp_path}/turns.db", "--watch-interval-s", "1")
        urls = [engine.url for engine in engines]
        proxy = stack.enter_context(ServeProcess(urls, tmp_path / "proxy.log", *flags))
        wait_ready(proxy.url)
        yield engines, proxy.url


def _disturb(
    engines: list[EngineProcess], url: str, ended: Event, kills: list[float], every_s: float
) -> None:
    """Update the weights again and again. `kills`: after how many seconds the first engine is killed."""
    began, version = time.monotonic(), 0
    with httpx.Client(base_url=url, timeout=120) as http:
        while not ended.wait(every_s):
            version += 1
            assert http.post("/pause", params=_PAUSE).status_code in (200, 424, 503)
            http.post("/update_weight_version", json={"new_version": str(version)})
            http.post("/resume")
            if kills and time.monotonic() - began > kills[0]:
                kills.pop(0)
                before = _sampled(engines[0])
                while _sampled(engines[0]) < before + _SAMPLED and not ended.wait(0.5):
                    pass
                assert engines[0].pid is not None
                os.killpg(engines[0].pid, signal.SIGKILL)
                engines[0].stop()
                wait_until(lambda: _starts(engines[0]))


def _sampled(engine: EngineProcess) -> float:
    """Number of ids that an engine has sampled since it started."""
    told = httpx.get(f"{engine.url}/metrics", timeout=60).text
    return sum(map(float, re.findall(r"^vllm:generation_tokens_total\S* (\S+)", told, re.MULTILINE)))


def _starts(engine: EngineProcess) -> bool:
    """Start an engine, unless what is left of the one before still has the port."""
    try:
        engine.start()
    except EngineStartError:
        return False
    return True


@contextmanager
def _disturbed(
    engines: list[EngineProcess],
    url: str,
    kills_after_s: Sequence[float] = (),
    every_s: float = _UPDATE_EVERY_S,
) -> Iterator[None]:
    """Meanwhile the engines are updated, and the first one is killed as often as is said."""
    ended, kills = Event(), list(kills_after_s)
    disturbing = Thread(target=_disturb, args=(engines, url, ended, kills, every_s))
    disturbing.start()
    try:
        yield
        assert kills == []
    finally:
        ended.set()
        disturbing.join()


@pytest.mark.timeout(START_TIMEOUT_S + 1200)
def test_nobody_notices_updates_and_kills(fleet: tuple[list[EngineProcess], str]) -> None:
    engines, url = fleet
    with _disturbed(engines, url, _KILLS_AFTER_S), ThreadPoolExecutor(_CONVERSATIONS) as threads:
        held = [
            threads.submit(_KINDS[number % 3], url, f"c{number}", number // 3 % 2 == 0)
            for number in range(_CONVERSATIONS)
        ]
    assert [error for each in held if (error := each.exception()) is not None] == []
    resumed: list[str] = []
    with httpx.Client(base_url=url, timeout=60) as http:
        for number in range(_CONVERSATIONS):
            record = record_of(http, f"c{number}", _TURNS)
            record.check_exact()
            [sample] = record.samples["samples"]
            for turn in sample["turns"]:
                assert turn["finish_reason"] != "abort"
                spans = [span[1:] for span in turn["weight_versions"]]
                assert turn["weights_uncertain"] or spans[0][0] == turn["start"], turn
                resumed += [segment["ended"] for segment in turn["segments"][:-1]]
    print({why: resumed.count(why) for why in sorted(set(resumed))})
    assert resumed.count("abort") >= 10
    assert len(resumed) > resumed.count("abort")


@needs(CLAUDE)
@needs(CODEX)
@pytest.mark.timeout(START_TIMEOUT_S + 900)
def test_claude_code_and_codex_notice_no_update(
    fleet: tuple[list[EngineProcess], str], tmp_path: Path
) -> None:
    engines, url = fleet
    homes = {name: tmp_path / name for name in ("claude", "codex")}
    for home in homes.values():
        home.mkdir()
    programs = {"claude": claude_turns("Bash"), "codex": codex_turns(tmp_path)}
    with Client(url) as client:
        for name in programs:
            client.create_session(name, overrides={**OVERRIDES, **NO_THINKING, "logit_bias": {"2": 1}})

    def work(name: str) -> None:
        for command in programs[name]:
            run_command(url, homes[name], name, *command, patience_s=300, DISABLE_AUTO_COMPACT="1")

    with _disturbed(engines, url, every_s=_OFTEN_S), ThreadPoolExecutor(2) as threads:
        works = [threads.submit(work, name) for name in programs]
    resumed = 0
    for done, name in zip(works, programs, strict=True):
        done.result()
        with Client(url) as client:
            session, samples = client.session(name), client.samples(name).samples
        assert session.refusals == 0, session.last_refusal
        turns, _ = check_tree(url, name)
        assert [turn["finish_reason"] for turn in turns].count("abort") == 0
        resumed += sum(bool(turn["segments"]) for sample in samples for turn in sample["turns"])
    assert resumed >= 2
