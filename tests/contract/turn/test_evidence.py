"""A fact that is added to the table of evidence needs nothing else: it is asked for, hidden, joined, recorded
and exported."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_vllm import Variant


@pytest.mark.timeout(90)  # a process of its own, which imports everything
@pytest.mark.parametrize(("variant", "store"), [(Variant.CHAT, "sqlite"), (Variant.SCALE_OUT, "redis")])
def test_an_invented_fact_takes_the_whole_way(
    variant: Variant, store: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = request.getfixturevalue("redis_url") if store == "redis" else f"sqlite://{tmp_path}/turns.db"
    program = [sys.executable, "-m", "tests.support.invented_fact", variant, url]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
