"""Claude Code and Codex while engines and connections break: the task ends, and nothing sampled is lost."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.campaign.agents.installed import CLAUDE, CODEX, needs, run_task
from tests.campaign.agents.recorded import check_recorded
from tests.campaign.agents.scripted_engine import Call, Script, ScriptedEngine, Step
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy, wait_until

_TASK = "Begin the task."
_PROGRAMS = pytest.mark.parametrize(
    "program",
    [
        pytest.param(CLAUDE, marks=needs(CLAUDE), id="claude"),
        pytest.param(CODEX, marks=needs(CODEX), id="codex"),
    ],
)
_CUT_AT = 12
"""The event at which an answer ends, after eleven ids."""


def _script(program: Path, *faults: dict[str, Any]) -> Script:
    """Two calls; the answer with the second one meets the faults, one after another."""

    def shell(command: str) -> tuple[Call]:
        if program == CLAUDE:
            return (("Bash", {"command": command, "description": "Work"}),)
        return (("exec_command", {"cmd": command}),)

    return Script(
        [
            Step(_TASK, "I look.\n", shell("cat notes.txt")),
            Step("omega", "All is done."),
            Step("alpha", "I write.\n", shell("echo omega >> done.txt; cat done.txt"), faults),
        ]
    )


def _run(program: Path, url: str, home: Path) -> None:
    """Run the task to its end."""
    flags = ["--allowedTools", "Bash"] if program == CLAUDE else []
    assert "All is done." in run_task(url, home, program, _TASK, *flags)
    assert (home / "done.txt").read_text() == "omega\n"


def _check(client: httpx.Client, script: Script, cuts: int, *, killed: bool = False) -> None:
    """Each answer was sampled once, and once more for each that was cut; each cut one is a branch.

    Args:
        cuts: how many answers ended after their first ids.
        killed: see `check_recorded`.
    """
    turns = check_recorded(str(client.base_url), script, killed=killed)
    first, second, last = (turn for turn in turns if turn["finish_reason"] != "abort")
    assert [turn["parent"] for turn in (first, second, last)] == [None, first["id"], second["id"]]
    aborted = [turn for turn in turns if turn["finish_reason"] == "abort"]
    assert [turn["parent"] for turn in aborted] == [first["id"]] * cuts


@_PROGRAMS
@pytest.mark.parametrize("how", ["close", "reset", "inside"])
def test_answers_that_are_cut(task_model: TinyModel, home: Path, program: Path, how: str) -> None:
    # Claude Code asks for no stream after one that broke
    script = _script(program, {"break_at": _CUT_AT, "how": how}, {"break_at": 0, "how": how})
    with ScriptedEngine(task_model, script) as engine, run_proxy([engine], store="memory:") as client:
        _run(program, str(client.base_url), home)
        assert len(script.cut) == 2
        _check(client, script, 1)


@_PROGRAMS
def test_an_engine_that_is_killed_and_started_again(task_model: TinyModel, home: Path, program: Path) -> None:
    script = _script(program, {"hold_at": _CUT_AT})
    with (
        ScriptedEngine(task_model, script) as engine,
        run_proxy([engine], store="memory:") as client,
        ThreadPoolExecutor(1) as threads,
    ):
        running = threads.submit(_run, program, str(client.base_url), home)
        wait_until(lambda: engine.held or running.done(), 60.0)
        time.sleep(0.5)  # the proxy reads what is on its way
        engine.kill()
        wait_until(lambda: client.get("/ready").status_code == 503)
        with ScriptedEngine(task_model, script, port=engine.port):
            running.result()
        _check(client, script, 1, killed=True)
