"""Claude Code and Codex, unmodified, work through a task of a scripted engine; all is recorded, exactly.

The task has calls of tools, several at once, one that fails, an edit of a file, a sub-agent, an answer that
breaks, and a history so long that the program summarises it.
"""

from collections import Counter
from pathlib import Path

import pytest

from tests.campaign.agents.installed import CLAUDE, CODEX, needs, run_program
from tests.campaign.agents.recorded import Turn, check_recorded, cut, roots
from tests.support.scripted_engine import Script, ScriptedEngine, Step, call
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy

pytestmark = pytest.mark.slow

_TASK, _SUB_TASK = "Begin the task.", "Count the lines of notes.txt."
_BREAKS = ({"break_at": 9, "how": "reset"},)
"""The first generation of a step breaks after eight ids."""
_SUMMARY = "SUMMARY-7: notes.txt was edited."
_PATCH = "*** Begin Patch\n*** Update File: notes.txt\n@@\n alpha\n-beta\n+gamma\n*** End Patch"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder of a program, with a file to edit."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "notes.txt").write_text("alpha\nbeta\n")
    return folder


def _bash(command: str) -> str:
    return call("Bash", command=command, description="Look")


def _claude_script() -> Script:
    agent = {"subagent_type": "general-purpose", "run_in_background": False}
    counted = call("Agent", description="Count", prompt=_SUB_TASK, **agent)
    return Script(
        [
            Step("detailed summary", f"<analysis>Short.</analysis>\n<summary>{_SUMMARY}</summary>"),
            Step("File created", "All is done.", within=_SUMMARY),
            Step("", call("Write", file_path="done.txt", content="finished\n"), within=_SUMMARY),
            Step(_SUB_TASK, _bash("wc -l < notes.txt")),
            Step(r"tool\n2<", "It has two lines."),
            Step(_TASK, f"I look at two things.\n{_bash('cat notes.txt')}\n{_bash('ls -a')}"),
            Step(r"alpha\nbeta", call("Read", file_path="notes.txt"), _BREAKS),
            Step(r"1\talpha", _bash("cat missing.txt")),
            Step("No such file", call("Edit", file_path="notes.txt", old_string="beta", new_string="gamma")),
            Step("has been updated", f"I ask another one.\n{counted}"),
            Step("two lines", _bash("seq 1 6000")),
            Step("5999\n6000", _bash("echo enough")),
        ]
    )


@needs(CLAUDE)
def test_claude_code(task_model: TinyModel, home: Path) -> None:
    script = _claude_script()
    with ScriptedEngine(task_model, script) as engine, run_proxy([engine], store="memory:") as client:
        url = str(client.base_url)
        tools = "Bash,Read,Edit,Write,Agent"
        printed = run_program(url, home, "task", str(CLAUDE), "-p", _TASK, "--allowedTools", tools)
        turns = check_recorded(url, "task", script)
    assert "All is done." in printed
    assert (home / "notes.txt").read_text() == "alpha\ngamma\n"
    assert (home / "done.txt").read_text() == "finished\n"
    assert len(cut(script)) == 1
    assert roots(turns) == [("main", "first_turn"), ("subagent", "first_turn"), ("main", "history_edited")]
    assert [turn["request_class"] for turn in turns].count("compaction") == 1
    assert _calls(turns) == {"Bash": 6, "Read": 1, "Edit": 1, "Agent": 1, "Write": 1}


def _calls(turns: list[Turn]) -> Counter[str]:
    """The names of the recorded calls of turns that ended."""
    messages = [turn["message"] for turn in turns if turn["finish_reason"] != "abort"]
    return Counter(each["function"]["name"] for message in messages for each in message.get("tool_calls", ()))


def _codex_script() -> Script:
    counted = call("multi_agent_v1__spawn_agent", message=_SUB_TASK)
    waiting = call("multi_agent_v1__wait_agent", targets=["$1"], timeout_ms=20_000)
    return Script(
        [
            Step("CONTEXT CHECKPOINT", _SUMMARY),
            Step(r"Output:\nwritten", "All is done."),
            Step(_SUMMARY, call("exec_command", cmd="echo finished > done.txt; echo written")),
            Step(_SUB_TASK, call("exec_command", cmd="wc -l < notes.txt")),
            Step(r"Output:\n2\n", "It has two lines."),
            Step(_TASK, f"I look at two things.\n{_exec('cat notes.txt')}\n{_exec('ls -a')}"),
            Step(r"alpha\nbeta", _exec("cat missing.txt"), _BREAKS),
            Step("No such file", _exec(f"apply_patch <<'EOF'\n{_PATCH}\nEOF\n")),
            Step("Success. Updated", f"I ask another one.\n{counted}"),
            Step('"agent_id": ?"([^"]*)"', waiting),
            Step("two lines", call("exec_command", cmd="seq 1 6000", max_output_tokens=10_000)),
            Step("5999\n6000", _exec("echo enough")),
        ]
    )


def _exec(command: str) -> str:
    return call("exec_command", cmd=command)


@needs(CODEX)
def test_codex(task_model: TinyModel, home: Path) -> None:
    script = _codex_script()
    with ScriptedEngine(task_model, script) as engine, run_proxy([engine], store="memory:") as client:
        url = str(client.base_url)
        flags = ["--skip-git-repo-check", "-s", "danger-full-access"]
        limit = ["-c", "model_auto_compact_token_limit=20000"]
        printed = run_program(url, home, "task", str(CODEX), "exec", *flags, *limit, _TASK)
        turns = check_recorded(url, "task", script)
    assert "All is done." in printed
    assert (home / "notes.txt").read_text() == "alpha\ngamma\n"
    assert (home / "done.txt").read_text() == "finished\n"
    assert len(cut(script)) == 1
    # the request for a summary has no tools
    assert roots(turns) == [
        ("main", "first_turn"),
        ("subagent", "first_turn"),
        ("compaction", "tools_changed"),
        ("main", "first_turn"),
    ]
    agents = {"multi_agent_v1__spawn_agent": 1, "multi_agent_v1__wait_agent": 1}
    assert _calls(turns) == {"exec_command": 8, **agents}
