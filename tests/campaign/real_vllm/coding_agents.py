"""Claude Code and Codex as unmodified programs, each in a session, with a home of its own."""

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from proxy.client import Client

ROOT = Path(__file__).parents[3]
CLAUDE, CODEX = (
    ROOT / ".cache" / "agents" / name / "node_modules" / ".bin" / name for name in ("claude", "codex")
)
OVERRIDES: dict[str, Any] = {
    "max_tokens": 400,
    "temperature": 0.7,
    "frequency_penalty": 0.5,
    "logit_bias": {"2": 4},
}
"""Turns are likely to end, and to repeat nothing: both programs repeat a request whose answer was cut off."""
TEXTS = ("Name a colour.", "And another?", "Which one is warmer?", "Thanks.")
BARE = ("--bare", "--system-prompt", "You are terse.")
"""Flags of Claude Code with which its first prompt is short."""


def needs(program: Path) -> pytest.MarkDecorator:
    """Skips a test where a program is missing."""
    return pytest.mark.skipif(not program.exists(), reason=f"run scripts/install-programs {program.name}")


def run_program(
    command: Sequence[str], home: Path, variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run it to its end, with a home of its own."""
    home.mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    environment = {**kept, "HOME": str(home), "XDG_STATE_HOME": str(home / "state")}
    environment["DISABLE_AUTO_COMPACT"] = "1"  # a summary begins a new conversation
    return subprocess.run(
        command,
        cwd=home,
        env={**environment, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
    )


def claude_turns(*flags: str) -> list[list[str]]:
    """The commands of a conversation with Claude Code."""
    commands = [[str(CLAUDE), *(["--continue"] if number else []), "-p"] for number in range(len(TEXTS))]
    return [[*command, text, *BARE, *flags] for command, text in zip(commands, TEXTS, strict=True)]


def codex_turns(folder: Path) -> list[list[str]]:
    """The commands of a conversation with Codex; `folder` is for a file of its instructions."""
    instructions = folder / "instructions.md"
    instructions.write_text("You are terse.")
    settings = ["--skip-git-repo-check", "-c", f"model_instructions_file={instructions}"]
    first = [str(CODEX), "exec", *settings]
    more = [str(CODEX), "exec", "resume", "--last", *settings]
    return [[*(more if number else first), text] for number, text in enumerate(TEXTS)]


class AgentRuns:
    """The runs of a program in one session."""

    def __init__(self, url: str, home: Path, **overrides: Any) -> None:
        self.session = f"agent-{secrets.token_hex(4)}"
        self.url = url
        self._home = home
        with Client(url) as client:
            client.create_session(self.session, overrides={**OVERRIDES, **overrides})

    def run(self, commands: Sequence[Sequence[str]], **variables: str) -> None:
        """Run commands with `tokenproxy run`, one after the other; each must end well."""
        path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        within = [
            sys.executable,
            "-m",
            "proxy.cli",
            "run",
            "--url",
            self.url,
            "--session",
            self.session,
            "--",
        ]
        for command in commands:
            done = run_program([*within, *command], self._home, {**variables, "PYTHONPATH": path})
            assert done.returncode == 0, done.stdout + done.stderr

    def turns(self) -> list[dict[str, Any]]:
        """The recorded turns, with their ids."""
        with Client(self.url) as client:
            return list(client.session(self.session, ids=True).turns)

    def answers_are_visible(self) -> bool:
        """Whether the model answered each turn with text or a call.

        If not, Claude Code asks again without the answer, or replaces it by words of its own.
        """
        messages = [turn["message"] for turn in self.turns()]
        return all((each.get("content") or "").strip() or each.get("tool_calls") for each in messages)

    def check(self, least: int) -> list[tuple[list[int], list[int]]]:
        """Every prompt but the first begins with all ids of an earlier turn; every leaf is a sample.

        A program may leave a turn out, and continue one before it: Claude Code does after an empty answer.

        Args:
            least: number of turns.

        Returns:
            The recorded prompt and the sampled ids of each turn.
        """
        with Client(self.url) as client:
            session = client.session(self.session, ids=True)
            samples = client.samples(self.session)
        assert len(session.turns) >= least
        sources = [(turn["source"], turn["reason"]) for turn in session.turns]
        expected = [("rendered", "first_turn"), *[("extended", None)] * (len(sources) - 1)]
        assert sources == expected, session.turns
        ids: dict[str | None, list[int]] = {None: []}
        recorded = []
        for turn in session.turns:
            assert turn["problem"] is None
            before = ids[turn["parent"]]
            assert turn["reused"] == len(before)
            prompt = [*before, *turn["appended_ids"]]
            recorded.append((prompt, turn["completion_ids"]))
            ids[turn["id"]] = prompt + turn["completion_ids"]
        leaves = ids.keys() - {turn["parent"] for turn in session.turns}
        whole = {
            sample["leaf"]: sample["prompt_ids"] + sample["completion_ids"] for sample in samples.samples
        }
        assert whole == {leaf: ids[leaf] for leaf in leaves}
        assert samples.refused == []
        return recorded
