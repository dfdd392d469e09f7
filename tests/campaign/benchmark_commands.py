"""Runs a benchmark's command as a child process, for the tests of the benchmarks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.child_environment import python_path_with_torch, python_path_without_torch

ROOT = Path(__file__).parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="pins processes to cores")


def run_benchmark(
    *arguments: str, timeout_s: float = 200, torch: bool = False
) -> "subprocess.CompletedProcess[str]":
    """Run Python with these arguments in the repository, and wait for its end.

    Args:
        torch: whether it can import torch, which is needed to write the checkpoint of the demo's model.

    Raises:
        subprocess.TimeoutExpired: it takes longer than `timeout_s` seconds.
    """
    path = python_path_with_torch() if torch else python_path_without_torch()
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
