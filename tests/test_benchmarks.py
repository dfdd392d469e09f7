"""The benchmark runs from start to end; what its numbers say is for people to judge, on quiet machines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cases import cases

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(sys.platform != "linux", reason="pins processes to cores")
def test_quick_run_prints_and_writes_every_case(tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    command = [sys.executable, "benchmarks/overhead.py", "--quick", "--json", str(written)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    for case in cases():
        assert f"| {case.name} " in run.stdout
    measured = json.loads(written.read_text())["cases"]
    assert [case["name"] for case in measured] == [case.name for case in cases()]
    assert all(case["proxy"]["requests"] > 0 for case in measured)


def test_an_unknown_case_is_refused_with_the_names_there_are() -> None:
    command = [sys.executable, "benchmarks/overhead.py", "--case", "no such"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert '"small chat"' in run.stderr
