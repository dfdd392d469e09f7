"""Log-probabilities that leave out how a turn was sampled are named wherever a trainer could take them."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_vllm import FakeVllm, Variant
from tests.support.talk import CHAT, GENERATE, Talk, user
from tokenproxy.cli.main import main

_PLAIN = {
    "temperature": 1,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
}
_MODES: dict[str, dict[int, list[float]]] = {
    "raw_logprobs": {0: [-9.15, -2.67], 1: [-22.76, -2.67]},
    "processed_logprobs": {0: [0.0], 1: [0.0]},
    "unknown": {0: [1.67], 1: [-11.94]},
}

_LEFT_OUT: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["temperature"]),  # that of the engine is not known
    (_PLAIN, []),
    ({**_PLAIN, "temperature": 0}, ["temperature"]),
    ({**_PLAIN, "top_k": 0, "presence_penalty": None, "max_tokens": 5, "seed": 1}, []),
    ({**_PLAIN, "top_p": 0.9, "top_k": 20, "min_p": 0.1}, ["top_p", "top_k", "min_p"]),
    (
        {**_PLAIN, "repetition_penalty": 1.1, "logit_bias": {"5": 1}, "min_tokens": 2},
        ["repetition_penalty", "logit_bias", "min_tokens"],
    ),
]


def _sampled(talk: Talk, session: str, **sampling: Any) -> None:
    body = {"messages": [user("Hi")], **sampling}
    talk.pair.client.post(CHAT, json=body, headers={"X-Session-ID": session}).raise_for_status()


def _samples(talk: Talk, session: str) -> Any:
    return talk.pair.client.get(f"/v1/sessions/{session}/samples").json()


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("mode", _MODES)
def test_samples_at_another_temperature_are_named_or_refused(
    mode: str,
    required: bool,
    own_talk: Callable[..., Talk],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = f"sqlite://{tmp_path / 'turns.db'}"

    def prepare(engine: FakeVllm) -> None:
        engine.only_logprobs = _MODES[mode]

    with caplog.at_level(logging.WARNING, "tokenproxy"):
        talk = own_talk(prepare, store=store, processed_logprobs_required=required)
        _sampled(talk, "warm", temperature=0.7)
        _sampled(talk, "plain", **_PLAIN)
    processed, hint = mode == "processed_logprobs", "--logprobs-mode processed_logprobs"
    [engine] = talk.pair.client.get("/ready").json()["engines"]
    assert (engine["logprobs_mode"], engine["ready"]) == (mode, True)
    warnings = [record.getMessage() for record in caplog.records if hint in record.getMessage()]
    assert warnings == ([] if processed else [f"{talk.pair.fake.url}: {engine['warning']}"])
    assert ("warning" in engine) is not processed

    [plain] = _samples(talk, "plain")["samples"]
    stated = "" if mode == "unknown" else mode
    assert (plain["logprobs_mode"], plain["turns"][0]["logprobs_without"]) == (stated, [])
    warm = _samples(talk, "warm")
    if required and not processed:
        assert (warm["samples"], warm["refused"][0]["reason"]) == ([], "logprobs_not_processed")
    else:
        [sample] = warm["samples"]
        assert sample["turns"][0]["logprobs_without"] == ([] if processed else ["temperature"])
    assert main(["export", "--store", store, "--out", str(tmp_path / "out.jsonl")]) == 0
    printed = capsys.readouterr().out
    assert (hint in printed) is not processed
    assert ("logprobs_not_processed" in printed) is (required and not processed)
    assert ("without temperature" in printed) is (not required and not processed)


def test_what_raw_log_probabilities_leave_out(own_talk: Callable[..., Talk]) -> None:
    """Of a chat completion and of a generate request, whose parameters stand one level deeper."""

    def prepare(engine: FakeVllm) -> None:
        engine.variant = Variant.SCALE_OUT

    talk = own_talk(prepare)
    for number, (sampling, names) in enumerate(_LEFT_OUT):
        _sampled(talk, f"s{number}", **sampling)
        generate = {"token_ids": [1, 74, 71], "sampling_params": {**sampling, "logprobs": 0}}
        headers = {"X-Session-ID": f"s{number}"}
        talk.pair.client.post(GENERATE, json=generate, headers=headers).raise_for_status()
        spans = [turn for sample in _samples(talk, f"s{number}")["samples"] for turn in sample["turns"]]
        assert [turn["logprobs_without"] for turn in spans] == [names, names]
