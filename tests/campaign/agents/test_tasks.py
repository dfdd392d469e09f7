"""Claude Code and Codex, unmodified, work through a task of a scripted engine; all is recorded, exactly.

The task has calls of tools, several at once, one that fails, an edit of a file, a sub-agent, answers that
break, and a history so long that the program summarises it.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from tests.campaign.agents.installed import CLAUDE, CODEX, needs, run_task
from tests.campaign.agents.recorded import Turn, check_recorded
from tests.campaign.agents.scripted_engine import Call, Script, ScriptedEngine, Step
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy

_TASK, _SUB_TASK = "Begin the task.", "Count the lines of notes.txt."
_BREAKS = ({"break_at": 9, "how": "reset"}, {"break_at": 0, "how": "inside"})
"""The first generation of a step breaks after eight ids, the next one before its first.

It is a call, of which this engine parses no half, so that the turn cannot go on. Claude Code asks for no
stream after one that broke.
"""
_UNNOTICED = ({"break_at": 4, "how": "reset"},)
"""The first generation breaks within its text, from where it goes on."""
_SUMMARY = (
    "SUMMARY-7: notes.txt was edited, its second line is gamma now. Another agent counted its lines. "
    "The file done.txt remains to be written, with one line that tells the end of the task."
)
_PATCH = "*** Begin Patch\n*** Update File: notes.txt\n@@\n alpha\n-beta\n+gamma\n*** End Patch"


def _bash(command: str) -> tuple[Call]:
    return (("Bash", {"command": command, "description": "Look"}),)


def _exec(command: str) -> tuple[Call]:
    return (("exec_command", {"cmd": command}),)


_AGENT = {"subagent_type": "general-purpose", "run_in_background": False}
_EDIT = {"file_path": "notes.txt", "old_string": "beta", "new_string": "gamma"}
_CLAUDE_STEPS = [
    Step("detailed summary", f"<analysis>Short.</analysis>\n<summary>{_SUMMARY}</summary>"),
    Step("File created", "All is done.", within=_SUMMARY),
    Step("", calls=(("Write", {"file_path": "done.txt", "content": "finished\n"}),), within=_SUMMARY),
    Step(_SUB_TASK, calls=_bash("wc -l < notes.txt")),
    Step(r"tool\n2<", "It has two lines."),
    Step(_TASK, "I look at two things.\n", (*_bash("cat notes.txt"), *_bash("ls -a")), _UNNOTICED),
    Step(r"alpha\nbeta", "", (("Read", {"file_path": "notes.txt"}),), _BREAKS),
    Step(r"1\talpha", calls=_bash("cat missing.txt")),
    Step("No such file", calls=(("Edit", _EDIT),)),
    Step(
        "has been updated", "I ask.\n", (("Agent", {"description": "Count", "prompt": _SUB_TASK, **_AGENT}),)
    ),
    Step("two lines", calls=_bash("seq 1 6000")),
    Step("5999\n6000", calls=_bash("echo enough")),
]
_WAIT = {"targets": ["$1"], "timeout_ms": 20_000}
_CODEX_STEPS = [
    Step("CONTEXT CHECKPOINT", _SUMMARY),
    Step(r"Output:\nwritten", "All is done."),
    Step(_SUMMARY, calls=_exec("echo finished > done.txt; echo written")),
    Step(_SUB_TASK, calls=_exec("wc -l < notes.txt")),
    Step(r"Output:\n2\n", "It has two lines."),
    Step(_TASK, "I look at two things.\n", (*_exec("cat notes.txt"), *_exec("ls -a")), _UNNOTICED),
    Step(r"alpha\nbeta", "", _exec("cat missing.txt"), _BREAKS),
    Step("No such file", calls=_exec(f"apply_patch <<'EOF'\n{_PATCH}\nEOF\n")),
    Step("Success. Updated", "I ask.\n", (("multi_agent_v1__spawn_agent", {"message": _SUB_TASK}),)),
    Step('"agent_id": ?"([^"]*)"', calls=(("multi_agent_v1__wait_agent", _WAIT),)),
    Step("two lines", calls=(("exec_command", {"cmd": "seq 1 6000", "max_output_tokens": 10_000}),)),
    Step("5999\n6000", calls=_exec("echo enough")),
]


def _work(
    model: TinyModel, home: Path, steps: list[Step], program: Path, *flags: str
) -> tuple[list[Turn], dict[str, Any]]:
    """Run the task to its end; returns its turns, and the first request that the engine got."""
    script = Script(steps)
    with ScriptedEngine(model, script) as engine, run_proxy([engine], store="memory:") as client:
        url = str(client.base_url)
        assert "All is done." in run_task(url, home, program, *flags)
        turns = check_recorded(url, script)
    assert (home / "notes.txt").read_text() == "alpha\ngamma\n"
    assert (home / "done.txt").read_text() == "finished\n"
    assert (len(script.cut), script.resumed) == (len(_BREAKS), len(_UNNOTICED))
    assert [turn["finish_reason"] for turn in turns].count("abort") == 1
    assert "x-anthropic-billing-header" not in script.sampled[0].new
    return turns, engine.generations()[0].json


def _roots(turns: list[Turn]) -> list[tuple[str, str | None]]:
    """Class and reason of each turn that continues none, in order."""
    return [(turn["request_class"], turn["reason"]) for turn in turns if turn["parent"] is None]


def _chain(turns: list[Turn]) -> list[tuple[int, str]]:
    """The segment of each turn that continues none, and the class of the turn that caused it."""
    classes = {turn["id"]: turn["request_class"] for turn in turns}
    roots = [turn for turn in turns if turn["parent"] is None]
    return [(turn["segment"], classes.get(turn["continues"], "")) for turn in roots]


def _calls(turns: list[Turn]) -> Counter[str]:
    """The names of the recorded calls of turns that ended."""
    messages = [turn["message"] for turn in turns if turn["finish_reason"] != "abort"]
    return Counter(each["function"]["name"] for message in messages for each in message.get("tool_calls", ()))


@needs(CLAUDE)
def test_claude_code(task_model: TinyModel, home: Path) -> None:
    flags = [_TASK, "--allowedTools", "Bash,Read,Edit,Write,Agent"]
    turns, request = _work(task_model, home, _CLAUDE_STEPS, CLAUDE, *flags)
    assert request["max_tokens"] == ScriptedEngine.max_model_len // 4
    assert _roots(turns) == [("main", "first_turn"), ("subagent", "first_turn"), ("main", "history_edited")]
    assert _chain(turns) == [(0, ""), (0, ""), (1, "compaction")]
    assert [turn["request_class"] for turn in turns].count("compaction") == 1
    assert _calls(turns) == {"Bash": 6, "Read": 1, "Edit": 1, "Agent": 1, "Write": 1}


@needs(CODEX)
def test_codex(task_model: TinyModel, home: Path) -> None:
    flags = ["-c", "model_auto_compact_token_limit=20000", _TASK]
    turns, request = _work(task_model, home, _CODEX_STEPS, CODEX, *flags)
    assert "web_search" not in str(request["tools"])
    # the request for a summary has no tools
    assert _roots(turns) == [
        ("main", "first_turn"),
        ("subagent", "first_turn"),
        ("compaction", "tools_changed"),
        ("main", "first_turn"),
    ]
    assert _chain(turns) == [(0, ""), (0, ""), (1, "main"), (2, "compaction")]
    agents = {"multi_agent_v1__spawn_agent": 1, "multi_agent_v1__wait_agent": 1}
    assert _calls(turns) == {"exec_command": 8, **agents}


@needs(CODEX)
def test_a_sub_agent_of_codex_is_told_its_task(task_model: TinyModel, home: Path) -> None:
    """In the second version of its agents, Codex marks what they tell each other as encrypted."""
    steps = [
        Step("two lines", "All is done."),
        Step(_SUB_TASK, "It has two lines."),
        Step(_TASK, calls=(("collaboration__spawn_agent", {"message": _SUB_TASK, "task_name": "counter"}),)),
        Step("/root/counter", calls=(("collaboration__wait_agent", {"timeout_ms": 20_000}),)),
    ]
    script = Script(steps)
    with ScriptedEngine(task_model, script) as engine, run_proxy([engine], store="memory:") as client:
        url = str(client.base_url)
        assert "All is done." in run_task(url, home, CODEX, "--enable", "multi_agent_v2", _TASK)
        turns = check_recorded(url, script)
    assert [turn["request_class"] for turn in turns].count("subagent") == 1
