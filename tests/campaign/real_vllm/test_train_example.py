"""`make train-demo`, two steps of it: what it trains over the proxy is what was sampled."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_MODULES = _ROOT / ".cache" / "trainer"


@pytest.mark.skipif(not _MODULES.exists(), reason="TRL's trainers need scripts/install-programs trainer")
def test_exact_rollouts_train_the_sampled_tokens(tmp_path: Path) -> None:
    paths = [_MODULES, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "examples.train", "--steps", "2", "--out", tmp_path],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "steps.csv").open() as file:
        steps = list(csv.DictReader(file))
    assert [(step["run"], step["step"]) for step in steps] == [
        *(("tokenproxy", number) for number in "12"),
        *(("re-tokenised", number) for number in "12"),
    ]
    # the second step is sampled with the weights of the first one's update
    for step in steps[:2]:
        assert (float(step["differing"]), float(step["unsampled"]), float(step["samples"])) == (0, 0, 1)
    assert all(int(step["tokens"]) > 0 for step in steps)
    assert "<svg" in (tmp_path / "training.svg").read_text()
    assert (tmp_path / "rollouts.html").stat().st_size > 0
