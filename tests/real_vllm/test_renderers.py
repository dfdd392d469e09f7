"""The generate client of `renderers` 0.1.12, unmodified, before an engine with `--enable-scale-out`."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import pytest

from proxy.demo.stack import EngineProcess
from tests.real_vllm.conftest import START_TIMEOUT_S, run_proxy

FOLDER = Path(__file__).parents[2] / ".cache" / "renderers"
SCRIPT = Path(__file__).parent / "neighbours" / "renderers_client.py"

pytestmark = pytest.mark.skipif(
    not (FOLDER / "renderers").exists(), reason="scripts/install-neighbours renderers was not run"
)


@pytest.fixture
def front(model: Path, tmp_path: Path) -> Iterator[str]:
    """The proxy before an engine with the flags that the client needs."""
    flags = ["--enable-scale-out", "--return-tokens-as-token-ids"]
    with EngineProcess(model, plugin=False, extra_flags=flags, log_file=tmp_path / "engine.log") as engine:
        engine.wait_ready(START_TIMEOUT_S)
        with run_proxy(engine.url) as url:
            yield url


async def test_turns_on_the_generate_route(front: str, model: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SCRIPT), front, str(model), f"renderers-{uuid4().hex}"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(FOLDER)},
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    turns = json.loads(output.splitlines()[-1])
    assert len(turns) == 3
    for turn in turns:
        assert len(turn["completion_ids"]) == len(turn["completion_logprobs"]) > 0
    for before, after in pairwise(turns):
        ids = before["prompt_ids"] + before["completion_ids"]
        assert after["prompt_ids"][: len(ids)] == ids
        assert len(after["prompt_ids"]) > len(ids)
