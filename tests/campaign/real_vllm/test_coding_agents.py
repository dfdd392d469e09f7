"""Claude Code and Codex, unmodified, on a real vLLM: every prompt begins with the ids before it.

What the engine got is read in its own log: through the proxy, and without it.
"""

import ast
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from proxy.agents.programs import Target, variables_for
from proxy.demo.stack import MODEL_NAME
from tests.acceptance.conftest import Server, start_engine
from tests.campaign.real_vllm.coding_agents import (
    CLAUDE,
    CODEX,
    AgentRuns,
    claude_turns,
    codex_turns,
    needs,
    run_program,
)
from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, only_inside, run_proxy

pytestmark = pytest.mark.timeout(START_TIMEOUT_S + 600)
_PROMPT = re.compile(r"Request (\S+) details: .* prompt_token_ids: (\[[\d, ]*\]), prompt_embeds")
_DELTA = re.compile(r"Generated response (\S+) \(streaming delta\) details: output_token_ids: (\[[\d, ]*\])")
_END_OF_MESSAGE = 2
_END_OF_REASONING = 12
"""Id of `</think>` in the tokenizer of the acceptance tests' engines."""


@dataclass
class _Logged:
    """One request in the engine's log."""

    prompt: list[int]
    shown: list[int] = field(default_factory=list)
    """The sampled ids that gave text, in order: vLLM logs no others."""


class _Engine:
    """A stock vLLM that logs the ids of every request."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self._log = log
        self._read = 0

    def requests(self) -> list[_Logged]:
        """Those since the last call, in order."""
        with self._log.open() as file:
            file.seek(self._read)
            text = file.read()
            self._read = file.tell()
        found: dict[str, _Logged] = {}
        for line in text.splitlines():
            if prompt := _PROMPT.search(line):
                found[prompt[1]] = _Logged(ast.literal_eval(prompt[2]))
            elif delta := _DELTA.search(line):
                found[delta[1]].shown += ast.literal_eval(delta[2])
        return list(found.values())


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Engine]:
    log = tmp_path_factory.mktemp("logged") / "vllm.log"
    flags = ("--enable-log-requests", "--enable-log-outputs")
    debug = {"VLLM_LOGGING_LEVEL": "DEBUG"}
    with start_engine(model, log, *flags, plugin=False, environment=debug) as running:
        running.wait_ready(START_TIMEOUT_S)
        yield _Engine(running.url, log)


@needs(CLAUDE)
def test_claude_code(engine: _Engine, tmp_path: Path) -> None:
    commands = claude_turns("--tools", "")
    _check(engine, tmp_path, commands)
    target = Target(engine.url, MODEL_NAME, 8192)
    variables = {
        name: value for name, value in variables_for(["claude"], target, os.environ).items() if value
    }
    for command in commands:
        run_program(command, tmp_path / "direct", {**variables, "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "400"})
    drifted, direct = _drifted(requests := engine.requests()), len(requests)
    print(f"without the proxy, {drifted} of {direct} prompts do not begin with what was sampled before")
    assert direct >= len(commands)


@needs(CLAUDE)
@only_inside
@pytest.mark.parametrize("thinks", [False, True], ids=["with a tool", "that thinks"])
def test_claude_code_inside_vllm(server: Server, tmp_path: Path, thinks: bool) -> None:
    """The thinking of earlier turns stays in the prompt, as it was sampled."""
    thinking = {
        "chat_template_kwargs": {"thinking": True},
        "logit_bias": {"2": 5, str(_END_OF_REASONING): 17},
    }
    for attempt in range(8):
        runs = AgentRuns(server.url, tmp_path / f"home-{attempt}", **(thinking if thinks else {}))
        runs.run(claude_turns("--tools", "" if thinks else "Bash"))
        thoughts = [turn for turn in runs.turns()[:-1] if turn["message"].get("reasoning")]
        if runs.answers_are_visible() and (thoughts or not thinks):
            break
    runs.check(4)
    assert bool(thoughts) is thinks
    assert all(_END_OF_REASONING in turn["completion_ids"] for turn in thoughts)


@needs(CODEX)
def test_codex(engine: _Engine, tmp_path: Path) -> None:
    _check(engine, tmp_path, codex_turns(tmp_path))


def _check(engine: _Engine, folder: Path, commands: Sequence[Sequence[str]]) -> None:
    """Through the proxy, the engine got exactly the recorded prompts, and sampled the recorded ids."""
    with run_proxy(engine.url, "--store", "memory:") as url:
        runs = AgentRuns(url, folder / "home")
        engine.requests()
        runs.run(commands)
        recorded = runs.check(4)
    logged = engine.requests()
    assert [request.prompt for request in logged] == [prompt for prompt, _ in recorded]
    for request, (_, sampled) in zip(logged, recorded, strict=True):
        assert _holds(sampled, request.shown)
    assert sum(len(request.shown) for request in logged) > len(logged)
    assert _drifted(logged) == 0


def _drifted(requests: Sequence[_Logged]) -> int:
    """The least number of prompts that begin with no earlier prompt and what was sampled then."""
    drifted, before = 0, list[_Logged]()
    for request in requests:
        repeated = any(request.prompt == each.prompt for each in before)
        if before and not repeated and not any(_continues(request.prompt, each) for each in before):
            drifted += 1
        before.append(request)
    return drifted


def _continues(prompt: list[int], before: _Logged) -> bool:
    """Whether it begins with an earlier prompt, and the next message holds what was shown of its turn."""
    end = len(before.prompt)
    if prompt[:end] != before.prompt or len(prompt) == end:
        return False
    message = prompt[end:]
    if _END_OF_MESSAGE in message:
        message = message[: message.index(_END_OF_MESSAGE)]
    return _holds(message, before.shown)


def _holds(ids: Sequence[int], shown: Sequence[int]) -> bool:
    """Whether ids hold others in this order."""
    rest = iter(ids)
    return all(token in rest for token in shown)
