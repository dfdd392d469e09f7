"""Programs of docs/trainers with the trainers' own classes, on a real vLLM, twice on one store."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.acceptance.conftest import Server
from tests.campaign.real_vllm.conftest import only_in_front

_ROOT = Path(__file__).parents[3]
_TRAINER = _ROOT / ".cache" / "trainer"
_CLIENT = Path(__file__).parent / "clients" / "trl_page.py"


@only_in_front
@pytest.mark.skipif(not _TRAINER.exists(), reason="scripts/install-programs trainer was not run")
def test_trl_trains_twice_with_the_program_of_its_page(server: Server, model: Path) -> None:
    """The steps of both runs, and the evaluations at the same steps, are of sessions of their own."""
    runs = [f"run-{uuid4().hex}" for _ in range(2)]
    calls = [_train(server, model, run) for run in runs]
    seen: list[str] = []
    for run, called in zip(runs, calls, strict=True):
        splits = []
        for call in called:
            assert call["turns_after_finish"] == [0, 0]
            assert call["reward"] == [float(prompt.split()[-1]) for prompt in call["prompts"]]
            for name in call["rollout"]:
                session = server.http.get(f"/v1/sessions/{name}").json()
                assert len(session["turns"]) == 2 and session["metadata"]["run"] == run
                splits.append((session["metadata"]["split"], session["metadata"]["step"]))
            seen += call["rollout"]
        assert sorted(splits) == [
            *[("eval", 1)] * 2,
            *[("eval", 2)] * 2,
            *[("train", 0)] * 2,
            *[("train", 1)] * 2,
        ]
    assert len({*seen}) == len(seen) == 16


def _train(server: Server, model: Path, run: str) -> list[dict[str, Any]]:
    paths = [_TRAINER, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(
        [sys.executable, _CLIENT, _ROOT / "docs/trainers/trl.md", server.url, model, run],
        env=os.environ | environment | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    calls: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return calls
