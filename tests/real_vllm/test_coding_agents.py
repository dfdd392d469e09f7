"""Claude Code and Codex, unmodified, on a real vLLM: every prompt begins with the ids before it."""

import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from proxy.client import Client
from tests.real_vllm.conftest import START_TIMEOUT_S, Served

pytestmark = pytest.mark.timeout(START_TIMEOUT_S + 600)

_ROOT = Path(__file__).parents[2]
_CLAUDE, _CODEX = (
    _ROOT / ".cache" / "agents" / name / "node_modules" / ".bin" / name for name in ("claude", "codex")
)
_OVERRIDES: dict[str, Any] = {"max_tokens": 400, "temperature": 0.7, "logit_bias": {"2": 4}}
"""The end of a turn is made likely: both programs repeat a request whose answer was cut off."""
_TEXTS = ("Name a colour.", "And another?", "Which one is warmer?", "Thanks.")


def _needs(program: Path) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not program.exists(), reason=f"no {program.name}: run scripts/install-agents")


class _Runs:
    """The runs of a program in one session, with a home of its own."""

    def __init__(self, url: str, home: Path) -> None:
        self.session = f"agent-{secrets.token_hex(4)}"
        self.url = url
        self._home = home
        home.mkdir()
        with Client(url) as client:
            client.create_session(self.session, overrides=_OVERRIDES)

    def run(self, *command: str) -> None:
        """Run it once; it must end well."""
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        environment = {**kept, "HOME": str(self._home), "XDG_STATE_HOME": str(self._home / "state")}
        environment["DISABLE_AUTO_COMPACT"] = "1"  # a summary begins a new conversation
        path = f"{_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "proxy.cli",
                "run",
                "--url",
                self.url,
                "--session",
                self.session,
                "--",
                *command,
            ],
            cwd=self._home,
            env={**environment, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def check(self, least: int) -> None:
        """Every prompt but the first begins with all ids of an earlier turn; every leaf is a sample.

        A program may leave a turn out, and continue one before it: Claude Code does after an empty answer.

        Args:
            least: number of turns.
        """
        with Client(self.url) as client:
            session = client.session(self.session, ids=True)
            samples = client.samples(self.session)
        assert len(session.turns) >= least
        sources = [(turn["source"], turn["reason"]) for turn in session.turns]
        assert sources == [("rendered", "first_turn"), *[("extended", None)] * (len(sources) - 1)]
        ids: dict[str | None, list[int]] = {None: []}
        for turn in session.turns:
            assert turn["problem"] is None
            before = ids[turn["parent"]]
            assert turn["reused"] == len(before)
            ids[turn["id"]] = [*before, *turn["appended_ids"], *turn["completion_ids"]]
        leaves = ids.keys() - {turn["parent"] for turn in session.turns}
        whole = {
            sample["leaf"]: sample["prompt_ids"] + sample["completion_ids"] for sample in samples.samples
        }
        assert whole == {leaf: ids[leaf] for leaf in leaves}
        assert samples.refused == []


def _each(runs: _Runs, first: Sequence[str], more: Sequence[str], rest: Sequence[str]) -> None:
    for number, text in enumerate(_TEXTS):
        runs.run(*(more if number else first), text, *rest)


@_needs(_CLAUDE)
def test_claude_code(server: Served, tmp_path: Path) -> None:
    runs = _Runs(server.url, tmp_path / "home")
    bare = ["--bare", "--system-prompt", "You are terse.", "--tools", ""]
    _each(runs, [str(_CLAUDE), "-p"], [str(_CLAUDE), "--continue", "-p"], bare)
    runs.check(4)


@_needs(_CODEX)
def test_codex(server: Served, tmp_path: Path) -> None:
    runs = _Runs(server.url, tmp_path / "home")
    instructions = tmp_path / "instructions.md"
    instructions.write_text("You are terse.")
    settings = ["--skip-git-repo-check", "-c", f"model_instructions_file={instructions}"]
    _each(runs, [str(_CODEX), "exec", *settings], [str(_CODEX), "exec", "resume", "--last", *settings], [])
    runs.check(4)
