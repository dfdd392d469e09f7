"""TRL 1.10, the last whose client calls the routes of `trl vllm-serve`, unmodified before real engines."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.campaign.real_vllm.conftest import Served, every_spelling
from tests.campaign.real_vllm.neighbours.programs import run_program
from tests.campaign.real_vllm.neighbours.trl_1_10 import PROMPTS

FOLDER = Path(__file__).parents[3] / ".cache" / "trl-1.10"
SCRIPT = Path(__file__).parent / "neighbours" / "trl_1_10.py"

pytestmark = pytest.mark.skipif(
    not (FOLDER / "trl").exists(), reason="scripts/install-programs trl-1.10 was not run"
)


def _check_logprobs(result: dict[str, Any], most: int) -> None:
    """For each sampled id a list with that id in it, the most probable first."""
    rows = zip(result["completion_ids"], result["logprobs"], result["logprob_token_ids"], strict=True)
    for sampled, logprobs, ranked in rows:
        assert len(sampled) == len(logprobs) == len(ranked) > 0
        for token, values, tokens in zip(sampled, logprobs, ranked, strict=True):
            assert token in tokens
            assert len(values) == len(tokens) <= most
            assert values == sorted(values, reverse=True)
            assert sum(map(math.exp, values)) <= 1.001


@every_spelling
async def test_the_client_of_trl_1_10(server: Served, model: Path) -> None:
    results = await run_program(sys.executable, SCRIPT, FOLDER, server.url, model)
    ids = results["ids"]
    assert ids["prompt_ids"] == PROMPTS
    assert len(ids["completion_ids"]) == 2 * len(PROMPTS)
    _check_logprobs(ids, 4)
    text = results["text"]
    with server.http() as http:
        rendered = [
            http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
            for prompt in ("The sky is", "Rome is")
        ]
        [digits] = results["regex"]["completion_ids"]
        said = http.post("/detokenize", json={"tokens": [t for t in digits if t > 2]}).json()["prompt"]
    assert text["prompt_ids"] == rendered
    _check_logprobs(text, 1)
    assert said.isdigit()
    assert len(said) == 3

    first, second = results["first"], results["second"]
    _check_logprobs(second, 1)
    befores = zip(first["prompt_ids"], first["completion_ids"], strict=True)
    for (prompt, sampled), after in zip(befores, second["prompt_ids"], strict=True):
        assert after[: len(prompt) + len(sampled)] == prompt + sampled
