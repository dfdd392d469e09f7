"""Runs a benchmark's command as a child process, for the tests of the benchmarks."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="pins processes to cores")


def run_benchmark(*arguments: str, timeout_s: float = 200) -> "subprocess.CompletedProcess[str]":
    """Run Python with these arguments in the repository, and wait for its end.

    Raises:
        subprocess.TimeoutExpired: it takes longer than `timeout_s` seconds.
    """
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
    )
