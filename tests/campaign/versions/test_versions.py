"""The acceptance tests on every release of vLLM that the product runs with.

Each release and way is a run of its own, one after the other, so that only one engine runs at a time.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.conftest import BOTH, ENGINE_LACKS, ENGINE_PYTHON, ENGINE_WAY

_ROOT = Path(__file__).parents[3]
_INSIDE, _FRONT = BOTH
_SCALING_OUT = ("0.27.1", "0.28.0", "0.29.0")
"""Releases that always serve the routes for scaling out, and have no flag for them."""
_RUNS = [
    *[(version, _FRONT) for version in _SCALING_OUT],
    *[(version, way) for version in ("0.30.0", "0.31.0", "0.33.0") for way in BOTH],
]
"""The release of .venv, 0.32.0, is the one of the acceptance tests themselves."""
_ENVIRONMENT = {
    # 0.33 is a build for CUDA, whose version does not name the platform
    "VLLM_TARGET_DEVICE": "cpu"
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("version", "way"), _RUNS)
def test_acceptance(version: str, way: str, tmp_path: Path) -> None:
    subprocess.run([_ROOT / "scripts" / "install-vllm", version], check=True)
    python = _ROOT / ".cache" / f"vllm-{version}" / "bin" / "python"
    environment = {**os.environ, **_ENVIRONMENT, ENGINE_PYTHON: str(python), ENGINE_WAY: way}
    environment |= {ENGINE_LACKS: "--enable-scale-out"} if version in _SCALING_OUT else {}
    flags = ("-q", "-n", "0", "--basetemp", str(tmp_path / "run"))
    command = [sys.executable, "-m", "pytest", "tests/acceptance", *flags]
    run = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    summary = run.stdout.rstrip().rpartition("\n")[2]
    print(f"vLLM {version} {way}: {summary}")
    assert run.returncode == 0, run.stdout[-20_000:]
    assert re.search(r"\d+ passed", summary)
