"""Claude Code and Codex as `scripts/install-programs claude codex` installs them, run as a user runs them."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_AGENTS = _ROOT / ".cache" / "agents"
CLAUDE, CODEX = (_AGENTS / name / "node_modules" / ".bin" / name for name in ("claude", "codex"))


def needs(program: Path) -> pytest.MarkDecorator:
    """Skips a test where a program is not installed."""
    return pytest.mark.skipif(not program.exists(), reason=f"run scripts/install-programs {program.name}")


def run_command(
    url: str, home: Path, session: str, *command: object, patience_s: float = 90.0, **variables: str
) -> str:
    """What a command prints that `tokenproxy run` starts; it must end well.

    Args:
        url: the proxy.
        home: its home and its working directory.
        variables: more of its environment.
    """
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    path = f"{_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    homes = {"HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "PYTHONPATH": path}
    run = [sys.executable, "-m", "tokenproxy", "run", "--url", url, "--session", session, "--"]
    process = subprocess.Popen(
        [*run, *map(str, command)],
        cwd=home,
        env={**kept, **homes, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=patience_s)
    finally:
        # the program too, which a killed parent would leave behind
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, printed + errors
    return printed


def run_task(url: str, home: Path, program: Path, *arguments: str) -> str:
    """What a program prints that works in the session `task`; it may do everything."""
    how = ["exec", "--skip-git-repo-check", "-s", "danger-full-access"] if program == CODEX else ["-p"]
    return run_command(url, home, "task", program, *how, *arguments)
