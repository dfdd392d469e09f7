"""Claude Code and Codex as `scripts/install-programs claude codex` installs them, run as a user runs them."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

_PATIENCE_S = 90.0
_ROOT = Path(__file__).parents[3]
_AGENTS = _ROOT / ".cache" / "agents"
CLAUDE, CODEX = (_AGENTS / name / "node_modules" / ".bin" / name for name in ("claude", "codex"))


def needs(program: Path) -> pytest.MarkDecorator:
    """Skips a test where a program is not installed."""
    return pytest.mark.skipif(not program.exists(), reason=f"run scripts/install-programs {program.name}")


def run_program(
    url: str, home: Path, session: str, *command: str, more: Mapping[str, str] | None = None
) -> str:
    """What a program prints that `tokenproxy run` starts; it must end well.

    It has a home of its own, which is also its working directory.

    Args:
        url: the proxy.
        more: environment variables.
    """
    home.mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    environment = {**kept, "HOME": str(home), "XDG_STATE_HOME": str(home / "state"), **(more or {})}
    process = subprocess.Popen(
        [sys.executable, "-m", "proxy.cli", "run", "--url", url, "--session", session, "--", *command],
        cwd=home,
        env={**environment, "PYTHONPATH": f"{_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=_PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(
                process.pid, signal.SIGKILL
            )  # the program too, which a killed parent would leave behind
    assert process.returncode == 0, printed + errors
    return printed
