"""Claude Code and Codex, unmodified, on a real vLLM: every prompt begins with the ids before it."""

from pathlib import Path

import pytest

from proxy.demo.stack import EngineProcess
from tests.campaign.real_vllm.coding_agents import CLAUDE, CODEX, AgentRuns, claude_turns, codex_turns, needs
from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, Served, only_in_front, only_inside
from tests.campaign.real_vllm.test_transparent_clients import END_OF_REASONING

pytestmark = pytest.mark.timeout(START_TIMEOUT_S + 600)


@pytest.mark.broad
@needs(CLAUDE)
@only_inside
@pytest.mark.parametrize("tools", ["", "Bash"])
def test_claude_code(server: Served, tmp_path: Path, tools: str) -> None:
    for attempt in range(4):
        runs = AgentRuns(server.url, tmp_path / f"home-{attempt}")
        runs.run(claude_turns("--tools", tools))
        if runs.answers_are_visible():
            break
    runs.check(4)


@needs(CLAUDE)
def test_claude_code_that_thinks(mortal_engine: EngineProcess, tmp_path: Path) -> None:
    """The thinking of earlier turns stays in the prompt, as it was sampled."""
    bias = {"2": 5, str(END_OF_REASONING): 17}
    for attempt in range(8):
        runs = AgentRuns(mortal_engine.url, tmp_path / f"home-{attempt}", logit_bias=bias)
        runs.run(claude_turns("--tools", ""))
        continued = runs.turns()[:-1]
        thinking = [turn for turn in continued if turn["message"].get("reasoning")]
        if thinking and runs.answers_are_visible():
            break
    runs.check(4)
    assert thinking
    assert all(END_OF_REASONING in turn["completion_ids"] for turn in thinking)


@pytest.mark.broad
@needs(CODEX)
@only_in_front
def test_codex(server: Served, tmp_path: Path) -> None:
    runs = AgentRuns(server.url, tmp_path / "home")
    runs.run(codex_turns(tmp_path))
    runs.check(4)
