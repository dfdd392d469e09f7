"""The logprobs mode of a stock vLLM that reports none, and what its log-probabilities leave out."""

from pathlib import Path

import httpx
import pytest

from tests.campaign.real_vllm.conftest import FRONT, run_way

_MESSAGES = [{"role": "user", "content": "Name a colour."}]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "unknown"])
def test_the_mode_of_a_stock_engine_is_measured(mode: str, model: Path, tmp_path: Path) -> None:
    flags = {"raw_logprobs": "raw_logprobs", "unknown": "raw_logits"}.get(mode, mode)
    with (
        run_way(FRONT, model, tmp_path / "log", "--logprobs-mode", flags) as url,
        httpx.Client(base_url=url, timeout=120) as http,
    ):
        [engine] = http.get("/ready").json()["engines"]
        assert (engine["logprobs_mode"], "warning" in engine) == (mode, mode != "processed_logprobs")
        means = []
        for name, temperature in (("cold", 0.01), ("plain", 1.0)):
            body = {"messages": _MESSAGES, "max_tokens": 8, "temperature": temperature, "seed": 1}
            headers = {"X-Session-ID": f"{mode}-{name}"}
            http.post("/v1/chat/completions", json=body, headers=headers).raise_for_status()
            [sample] = http.get(f"/v1/sessions/{mode}-{name}/samples").json()["samples"]
            without = [] if mode == "processed_logprobs" or name == "plain" else ["temperature"]
            assert sample["turns"][0]["logprobs_without"] == without
            assert sample["logprobs_mode"] == ("" if mode == "unknown" else mode)
            means.append(sum(sample["logprobs"]) / len(sample["logprobs"]))
        if mode != "unknown":  # at temperature 0.01 the most likely id is sampled nearly always
            assert (means[0] > -0.01) is (mode == "processed_logprobs")
