"""Claude Code and Codex, unmodified, end without an error when their session reaches a limit."""

from pathlib import Path
from typing import Any

import pytest

from tests.campaign.agents.installed import CLAUDE, CODEX, needs, run_task
from tests.campaign.agents.recorded import check_recorded
from tests.campaign.agents.scripted_engine import Call, Script, ScriptedEngine, Step
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy

_TASK = "Begin the task."
_CLAUDE_FLAGS = (_TASK, "--allowedTools", "Bash")
_EVERY_LIMIT = pytest.mark.parametrize(
    ("limits", "turns"), [({"turns": 2}, 2), ({"sampled_ids": 20}, 1), ({"seconds": 0}, 1)]
)


def _shell(program: Path, command: str) -> tuple[Call]:
    if program == CODEX:
        return (("exec_command", {"cmd": command}),)
    return (("Bash", {"command": command, "description": "Look"}),)


def _end_early(
    model: TinyModel, home: Path, program: Path, flags: tuple[str, ...], limits: dict[str, int], turns: int
) -> None:
    """Run a task that never ends; the program must end well, with the proxy's message as its last one."""
    steps = [
        Step(_TASK, "I look.\n", _shell(program, "cat notes.txt")),
        Step(r"alpha\nbeta", calls=_shell(program, "echo again")),
        Step("again", calls=_shell(program, "echo again")),
    ]
    described: Any = {"limits": limits, "policy": {"temperature": 0.25, "top_p": 0.5}}
    script = Script(steps)
    with ScriptedEngine(model, script) as engine, run_proxy([engine], store="memory:") as client:
        client.post("/v1/sessions", json={"id": "task", **described}).raise_for_status()
        printed = run_task(str(client.base_url), home, program, *flags)
        recorded = check_recorded(str(client.base_url), script)
        sent = [(each.json["temperature"], each.json["top_p"]) for each in engine.generations()]
    [limit] = limits
    assert f"The session has reached its limit ({limit})" in printed
    assert [turn["finish_reason"] for turn in recorded] == ["tool_calls"] * turns
    assert sent == [(0.25, 0.5)] * turns


@_EVERY_LIMIT
@needs(CLAUDE)
def test_claude_code(task_model: TinyModel, home: Path, limits: dict[str, int], turns: int) -> None:
    _end_early(task_model, home, CLAUDE, _CLAUDE_FLAGS, limits, turns)


@_EVERY_LIMIT
@needs(CODEX)
def test_codex(task_model: TinyModel, home: Path, limits: dict[str, int], turns: int) -> None:
    _end_early(task_model, home, CODEX, (_TASK,), limits, turns)
