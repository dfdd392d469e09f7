import pytest

from tokenproxy.record.completion import Completion, SampledChoice, untrainable_reason
from tokenproxy.record.vocabulary import Problem

_SENT = b"[5,6]"


def _completion(
    count: int | None = 2, prompt: bytes | None = b"[5, 6]", *more: SampledChoice, **sampled: object
) -> Completion:
    fields: dict[str, object] = {"ids": [7, 8], "logprobs": [0.0, -1.0], "finish_reason": "stop", **sampled}
    return Completion(prompt, [SampledChoice(0, **fields), *more], count)  # type: ignore[arg-type]


_CASES: dict[str, tuple[Completion, str]] = {
    "sound": (_completion(), ""),
    "nothing counted": (_completion(None), ""),
    "two choices counted together": (_completion(3, _SENT, SampledChoice(1, ids=[9])), ""),
    "no prompt": (_completion(2, None), "no_prompt_ids"),
    "another prompt": (_completion(2, b"[5,7]"), "prompt_mismatch"),
    "no ids": (_completion(ids=None), "no_completion_ids"),
    "one id too few": (_completion(ids=[7]), "ids_missing"),
    "one id too many": (_completion(ids=[7, 8, 9]), "usage_mismatch"),
    "too few of a choice": (_completion(None, ids=[7], logprobs=[0.0], counted=2), "usage_mismatch"),
    "too few in another choice": (_completion(3, _SENT, SampledChoice(1, ids=[])), "usage_mismatch"),
    "no logprobs": (_completion(logprobs=None), "no_logprobs"),
    "one logprob too few": (_completion(logprobs=[0.0]), "logprobs_mismatch"),
    "a logprob that is not a number": (_completion(logprobs=[0.0, float("nan")]), "logprobs_not_finite"),
    "ids of an unknown shape": (_completion(ids=None, unreadable="token_ids"), "unreadable_evidence"),
    "one logprob too many": (_completion(logprobs=[0.0, 0.0, 0.0]), "ids_missing"),
}


@pytest.mark.parametrize("completion, problem", _CASES.values(), ids=_CASES)
def test_problems(completion: Completion, problem: str) -> None:
    found = untrainable_reason(completion, completion.choices[0], _SENT, media=False)
    assert found == (Problem(problem) if problem else None)


@pytest.mark.parametrize(
    ("prompt", "media", "problem"),
    [(b"[1,2,3]", False, None), (b"[]", False, "no_prompt_ids"), (b"[1,2,3]", True, "media")],
)
def test_any_prompt_of_rendered_messages_is_accepted(prompt: bytes, media: bool, problem: str | None) -> None:
    completion = _completion(2, prompt)
    assert untrainable_reason(completion, completion.choices[0], b"", media=media) == problem
