"""The examples on a real vLLM: what they print is what happened to the ids."""

import re
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from tests.acceptance.conftest import Server
from tests.campaign.real_vllm.conftest import only_in_front

pytestmark = only_in_front

_FOLDER = Path(__file__).parents[3] / "examples"


def run_example(name: str, server: Server, *arguments: str) -> str:
    """What the example prints; it must succeed."""
    command = [sys.executable, str(_FOLDER / name), "--url", server.url, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (run.returncode, run.stderr) == (0, ""), run.stderr + run.stdout
    return run.stdout


@pytest.mark.parametrize("flags", [[], ["--stream"]], ids=["whole", "stream"])
def test_an_agent_in_a_session(server: Server, flags: list[str]) -> None:
    """Six turns, each after the first an exact extension of the one before."""
    session = f"agent-{uuid4().hex}"
    printed = run_example("agent.py", server, "--session", session, *flags)
    rows = re.findall(r"(?m)^ +(\d) +(\w+) +(\S+) +(\d+) +(\S+) +(\w+)  ", printed)
    assert [row[0] for row in rows] == list("123456"), printed
    assert [row[1:3] for row in rows] == [("rendered", "first_turn"), *[("extended", "-")] * 5]
    assert "tool_calls" in {row[5] for row in rows}
    assert printed.endswith(f"session {session}: reward 1.0, samples: 1\n")
    recorded = server.http.get(f"/v1/sessions/{session}").json()
    assert (recorded["reward"], len(recorded["turns"])) == (1.0, 6)


def test_an_environment_that_holds_the_ids(server: Server) -> None:
    printed = run_example("environment.py", server, "--turns", "4")
    rows = [[int(number) for number in row] for row in re.findall(r"(?m)^ +(\d+)" + r" +(\d+)" * 4, printed)]
    turns, reused, appended, sampled, total = zip(*rows, strict=True)
    assert turns == tuple(range(1, len(rows) + 1))
    assert len(rows) == 4 or "correct" in printed
    assert reused == (0, *total[:-1])
    assert all(a + b + c == whole for a, b, c, whole in zip(reused, appended, sampled, total, strict=True))
    assert re.search(rf"reward [\d.]+ for {total[-1]} ids, {sum(sampled)} of them sampled", printed)


def test_environments_that_append_locally(server: Server, model: Path) -> None:
    arguments = ["--tokenizer", str(model), "--games", "3", "--turns", "3"]
    printed = run_example("environment_async.py", server, *arguments)
    games = re.findall(r"(?m)^game (\d): (\d+) ids, (\d+) sampled, reward [\d.]+$", printed)
    assert [game[0] for game in games] == list("123"), printed
    assert all(0 < int(sampled) < int(ids) for _, ids, sampled in games)


def test_a_trainer_that_reads_the_feed(server: Server) -> None:
    consumer = f"trainer-{uuid4().hex}"
    printed = run_example("trainer.py", server, "--rollouts", "3", "--consumer", consumer)
    rows = re.findall(r"(?m)^\w{32} +1 +(\d+) +(\d+) +([\d.]+)$", printed)
    assert len(rows) == 3, printed
    assert all(0 < int(trained) < int(ids) and 0 < float(reward) <= 1 for ids, trained, reward in rows)
    assert printed.endswith(f"3 rollouts, {sum(int(row[1]) for row in rows)} ids to train on\n")
