"""`/get_sequence_logprobs/` of TRL: log-probabilities of given sequences, in both of its formats."""

import base64
import math
from array import array
from typing import Any

import httpx
import pytest

from tests.support.fake_completions import prompt_logprobs_of
from tests.support.fake_vllm import Canned, FakeVllm, Reply
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy

SCORES, COMPLETIONS = "/get_sequence_logprobs/", "/v1/completions"
SEQUENCES = [[1, 8, 50, 7], [1, 9], [1, 60, 8]]
LENGTHS = [1, 2, 0]
NO = -math.inf


def _post(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"sequences": SEQUENCES, "prompt_lengths": LENGTHS, "top_logprobs": 2, **fields}
    response = client.post(SCORES, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _numbers(encoded: str, kind: str) -> list[float]:
    return list(array(kind, base64.b64decode(encoded)))


def test_lists(client: httpx.Client, fake: FakeVllm) -> None:
    answer = _post(client)
    top = [-0.25, -0.5]
    assert answer == {
        "logprobs": [[top, [*top, -24.75], top], [], [[], [*top, -24.75], top]],
        "logprob_token_ids": [[[7, 8], [7, 8, 50], [7, 8]], [], [[], [7, 8, 60], [7, 8]]],
    }
    sent = sorted((seen.json for seen in fake.seen(COMPLETIONS)[-3:]), key=lambda body: body["prompt"])
    assert [body["prompt"] for body in sent] == sorted(SEQUENCES)
    assert sent[0] == {"prompt": SEQUENCES[0], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 2}


def test_arrays(client: httpx.Client) -> None:
    answer = _post(client, response_format="binary", temperature=0.7)
    assert (answer["shape"], answer["completion_lengths"]) == ([3, 3, 2], [3, 0, 3])
    row, none = [-0.25, -0.5], [NO, NO]
    expected = [*row * 3, *none * 3, *none, *row * 2]
    assert _numbers(answer["logprobs_b64"], "f") == expected
    assert _numbers(answer["token_ids_b64"], "i") == [7, 8] * 3 + [0] * 6 + [0, 0] + [7, 8] * 2
    assert _numbers(answer["actual_logprobs_b64"], "f") == [-0.5, -24.75, -0.25, *[NO] * 4, -24.75, -0.5]
    assert _numbers(answer["actual_token_ids_b64"], "i") == [8, 50, 7, 0, 0, 0, 0, 60, 8]


def test_one_log_probability_for_each_id(client: httpx.Client) -> None:
    answer = _post(client, top_logprobs=1, response_format="binary", prompt_lengths=[3, 1, 2])
    assert _numbers(answer["token_ids_b64"], "i") == [7, 7, 7]
    assert _numbers(answer["actual_logprobs_b64"], "f") == [-0.25, -24.75, -24.75]


@pytest.mark.parametrize("value", ["NaN", "-9999.0"])
def test_what_is_no_number(client: httpx.Client, fake: FakeVllm, value: str) -> None:
    """NaN is what vLLM may return, -9999 what its completions route has for minus infinity."""
    body = b'{"choices": [{"prompt_logprobs": [null, {"8": {"logprob": %b, "rank": 1}}]}]}' % value.encode()
    fake.canned[COMPLETIONS] = Canned(body, headers={"content-type": "application/json"})
    one = {"sequences": [[1, 8]], "prompt_lengths": [1], "top_logprobs": 1}
    assert _post(client, **one)["logprobs"] == [[[None]]]
    answer = _post(client, **one, response_format="binary")
    assert [_numbers(answer[name], "f") for name in ("logprobs_b64", "actual_logprobs_b64")] == [[NO], [NO]]


def test_nothing_is_recorded(client: httpx.Client) -> None:
    before = client.get("/v1/sessions").json()["data"]
    _post(client)
    assert client.get("/v1/sessions").json()["data"] == before


def test_sequences_are_spread_over_the_fleet(tiny_model: TinyModel) -> None:
    with FakeVllm(tiny_model) as one, FakeVllm(tiny_model) as other, run_proxy([one, other]) as client:
        one.usual = other.usual = Reply(pause_s=0.2)  # eight at once are in work
        answer = _post(client, sequences=[[1, 8]] * 40, prompt_lengths=[1] * 40)
        assert answer["logprob_token_ids"] == [[[7, 8]]] * 40
        assert min(len(engine.seen(COMPLETIONS)) for engine in (one, other)) > 5


_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no sequences": ({"sequences": []}, "sequences"),
    "text": ({"sequences": ["hi"], "prompt_lengths": [1]}, "sequences[0]"),
    "an empty sequence": ({"sequences": [[1], []], "prompt_lengths": [0, 0]}, "sequences[1]"),
    "no lengths": ({"prompt_lengths": None}, "prompt_lengths"),
    "too few lengths": ({"prompt_lengths": [1]}, "prompt_lengths"),
    "a length that is too long": ({"prompt_lengths": [1, 3, 0]}, "prompt_lengths[1]"),
    "a negative length": ({"prompt_lengths": [-1, 1, 0]}, "prompt_lengths[0]"),
    "no log-probabilities": ({"top_logprobs": 0}, "top_logprobs"),
    "text as temperature": ({"temperature": "hot"}, "temperature"),
    "another format": ({"response_format": "xml"}, "response_format"),
}


@pytest.mark.parametrize(("fields", "param"), _WRONG.values(), ids=_WRONG)
def test_wrong_fields_are_named(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    body = {"sequences": SEQUENCES, "prompt_lengths": LENGTHS, **fields}
    response = client.post(SCORES, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_the_engines_refusal_is_passed_on(client: httpx.Client) -> None:
    response = client.post(SCORES, json={"sequences": [[1], [10**9]], "prompt_lengths": [0, 0]})
    assert (response.status_code, "out of vocabulary" in response.text) == (400, True)


def test_an_engine_without_these_log_probabilities(client: httpx.Client, fake: FakeVllm) -> None:
    body = b'{"choices": [{"prompt_logprobs": null}]}'
    fake.canned[COMPLETIONS] = Canned(body, headers={"content-type": "application/json"})
    response = client.post(SCORES, json={"sequences": [[1, 8]], "prompt_lengths": [1]})
    assert response.status_code == 502


def test_the_fake_has_vllms_shape() -> None:
    assert prompt_logprobs_of([1, 9], 1) == [
        None,
        {
            "9": {"logprob": -24.75, "rank": 99, "decoded_token": "x"},
            "7": {"logprob": -0.25, "rank": 1, "decoded_token": "x"},
        },
    ]
