"""Claude Code and Codex themselves understand the environment that `tokenproxy run` gives them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agents.scripted import ANSWER, MODEL, Scripted, scripted

_ROOT = Path(__file__).parents[2]
_AGENTS = _ROOT / ".cache" / "agents"
_CLAUDE, _CODEX = (_AGENTS / name / "node_modules" / ".bin" / name for name in ("claude", "codex"))
_BARE = ["--bare", "--system-prompt", "You are terse.", "--tools", ""]


def _needs(program: Path) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not program.exists(), reason=f"no {program.name}: run scripts/install-agents")


def _run(server: Scripted, home: Path, session: str, *command: str) -> str:
    """What a program prints. It has a home of its own, and may reach nobody else."""
    home.mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    environment = {**kept, "HOME": str(home), "XDG_STATE_HOME": str(home / "state")}
    done = subprocess.run(
        [sys.executable, "-m", "proxy.cli", "run", "--url", server.url, "--session", session, "--", *command],
        cwd=home,
        env={**environment, "PYTHONPATH": f"{_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@_needs(_CLAUDE)
def test_claude_code(tmp_path: Path) -> None:
    with scripted(32768) as server:
        for text in (["Name a colour"], ["--continue", "Another"]):
            assert ANSWER in _run(server, tmp_path / "home", "run-7", str(_CLAUDE), "-p", *text, *_BARE)
        first, second = server.seen
    assert first.path == "/sessions/run-7/v1/messages?beta=true"
    assert (first.body["model"], first.body["max_tokens"]) == (MODEL, 8192)
    assert first.headers["authorization"] == "Bearer tokenproxy"
    assert first.headers["x-claude-code-request-class"] == "main"
    assert first.headers["x-claude-code-session-id"] == second.headers["x-claude-code-session-id"]
    assert "x-anthropic-billing-header" not in str(first.body["system"])
    assert ANSWER in str(second.body["messages"])


@_needs(_CODEX)
def test_codex(tmp_path: Path) -> None:
    with scripted(32768) as server:
        for text in (["Name a colour"], ["resume", "--last", "Another"]):
            printed = _run(
                server, tmp_path / "home", "run-7", str(_CODEX), "exec", "--skip-git-repo-check", *text
            )
            assert ANSWER in printed
        first, second = server.seen
    assert first.path == "/v1/responses"
    assert first.body["model"] == MODEL
    assert first.headers["x-session-id"] == second.headers["x-session-id"] == "run-7"
    assert first.headers["session-id"] == first.headers["thread-id"] == second.headers["session-id"]
    assert first.headers["authorization"] == "Bearer tokenproxy"
    assert "web_search" not in [tool["type"] for tool in first.body["tools"]]
    assert ANSWER in str(second.body["input"])
