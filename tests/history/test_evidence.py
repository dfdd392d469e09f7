import pytest

from proxy.history.evidence import PROBLEMS, Outcome, Sampled, problem_of, same_ids

_SENT = b"[5,6]"


def _outcome(
    count: int | None = 2, prompt: bytes | None = b"[5, 6]", *more: Sampled, **sampled: object
) -> Outcome:
    fields: dict[str, object] = {"ids": [7, 8], "logprobs": [0.0, -1.0], "finish_reason": "stop", **sampled}
    return Outcome(prompt, [Sampled(0, **fields), *more], count)  # type: ignore[arg-type]


_CASES: dict[str, tuple[Outcome, str]] = {
    "sound": (_outcome(), ""),
    "nothing counted": (_outcome(None), ""),
    "two choices counted together": (_outcome(3, _SENT, Sampled(1, ids=[9], finish_reason="stop")), ""),
    "no prompt": (_outcome(2, None), "no_prompt_ids"),
    "an empty prompt": (_outcome(2, b"[]"), "no_prompt_ids"),
    "another prompt": (_outcome(2, b"[5,7]"), "prompt_mismatch"),
    "a longer prompt": (_outcome(2, b"[5,6,7]"), "prompt_mismatch"),
    "no ids": (_outcome(ids=None), "no_completion_ids"),
    "no ids and nothing counted": (_outcome(None, ids=None, logprobs=None), "no_completion_ids"),
    "one id too few": (_outcome(ids=[7]), "ids_missing"),
    "one id too many": (_outcome(ids=[7, 8, 9]), "usage_mismatch"),
    "one id too few, and one log-probability": (_outcome(ids=[7], logprobs=[0.0]), "usage_mismatch"),
    "one id too few, counted for the choice": (
        _outcome(None, ids=[7], logprobs=[0.0], counted=2),
        "usage_mismatch",
    ),
    "one id too few in another choice": (
        _outcome(3, _SENT, Sampled(1, ids=[], finish_reason="stop")),
        "usage_mismatch",
    ),
    "no logprobs": (_outcome(logprobs=None), "no_logprobs"),
    "one logprob too few": (_outcome(logprobs=[0.0]), "logprobs_mismatch"),
    "one logprob too many": (_outcome(logprobs=[0.0, 0.0, 0.0]), "ids_missing"),
}


@pytest.mark.parametrize("outcome, problem", _CASES.values(), ids=_CASES)
def test_problems(outcome: Outcome, problem: str) -> None:
    assert problem_of(outcome, outcome.choices[0], _SENT, media=False) == problem
    assert not problem or problem in PROBLEMS


def test_a_prompt_that_was_rendered_is_believed() -> None:
    outcome = _outcome(2, b"[1,2,3]")
    assert problem_of(outcome, outcome.choices[0], b"", media=False) == ""


def test_an_empty_prompt_is_none() -> None:
    outcome = _outcome(2, b"[]")
    assert problem_of(outcome, outcome.choices[0], b"", media=False) == "no_prompt_ids"


def test_media() -> None:
    outcome = _outcome()
    assert problem_of(outcome, outcome.choices[0], b"", media=True) == "media"


@pytest.mark.parametrize(
    "left, right, same",
    [
        (b"[1,2]", b"[1, 2]", True),
        (b"[1,2]", b"[1,2,3]", False),
        (b"[12]", b"[1,2]", False),
        (b"[]", b"[]", True),
    ],
)
def test_same_ids(left: bytes, right: bytes, same: bool) -> None:
    assert same_ids(left, right) is same_ids(right, left) is same
