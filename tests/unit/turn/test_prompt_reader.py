"""What is read of completions with several prompts, and of responses of generate."""

from typing import Any

import pytest

from proxy.history.completion import Batch, Completion, SampledChoice
from proxy.history.turn import WeightSpan
from proxy.turn.reader import StreamReader, read_completion
from tests.unit.turn.bodies import ODD, Body, encoded

_BATCH = Batch((b"[5,6]", b""), 2)


def _choice(index: int, **fields: Any) -> Body:
    """A choice of the completions route, whole or a piece."""
    logprobs = {"tokens": ["h", "i"], "token_logprobs": [-0.5, -0.25], "top_logprobs": [], "text_offset": []}
    return {
        "index": index,
        "text": "hi",
        "logprobs": logprobs,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": [7, 2],
        "prompt_token_ids": [5, 6] if index < 2 else [8],
        **fields,
    }


def _whole(*choices: Body, **fields: Any) -> Body:
    return {"id": "c", "choices": list(choices), "usage": {"completion_tokens": 2 * len(choices)}, **fields}


def _problems(completion: Completion) -> list[str]:
    return [choice.unreadable for choice in completion.choices]


def test_each_choice_has_its_prompt() -> None:
    completion = read_completion(encoded(_whole(*map(_choice, range(4)))), batch=_BATCH)
    assert [choice.prompt_ids for choice in completion.choices] == [b"[5,6]"] * 2 + [b"[8]"] * 2
    assert completion.prompt_ids is None
    assert completion.choices[3] == SampledChoice(
        3,
        {"role": "assistant", "content": "hi"},
        [7, 2],
        [-0.5, -0.25],
        "stop",
        prompt_ids=b"[8]",
    )
    parts = completion.by_prompt(_BATCH)
    assert {position: part.prompt_ids for position, part in parts.items()} == {0: b"[5,6]", 1: b"[8]"}
    assert [[choice.index for choice in parts[at].choices] for at in (0, 1)] == [[0, 1], [2, 3]]
    assert [parts[at].completion_tokens for at in (0, 1)] == [4, 4]


def test_a_difference_in_the_number_of_ids_shows_in_each_part() -> None:
    body = _whole(*map(_choice, range(4)), usage={"completion_tokens": 9})
    parts = read_completion(encoded(body), batch=_BATCH).by_prompt(_BATCH)
    assert [parts[at].completion_tokens for at in (0, 1)] == [5, 5]


def test_the_first_echo_of_a_prompt_is_that_of_its_choices() -> None:
    """vLLM's streams echo a prompt once, with the choice that comes first."""
    reader = StreamReader(4, batch=_BATCH)
    for index in (1, 0, 3, 2):
        echo = {1: [5, 6], 3: [8]}.get(index)
        chunk = _whole(_choice(index, prompt_token_ids=echo), usage={"completion_tokens": 2})
        reader.read(encoded(chunk))
    completion = reader.ended()
    assert reader.complete
    assert {choice.index: choice.prompt_ids for choice in completion.choices} == {
        0: b"[5,6]",
        1: b"[5,6]",
        2: b"[8]",
        3: b"[8]",
    }


def test_a_stream_is_put_together() -> None:
    reader = StreamReader(2, batch=Batch((b"[5,6]",), 2))
    for text, ids, end in (("h", [7], None), ("i", [], None), ("", [2], "length")):
        fields: Body = {"text": text, "token_ids": ids, "finish_reason": end}
        fields["logprobs"] = {"token_logprobs": [-0.5] * len(ids)}
        reader.read(encoded(_whole(_choice(1, **fields))))
    [choice] = reader.ended().choices
    assert (choice.ids, choice.logprobs, choice.finish_reason) == ([7, 2], [-0.5, -0.5], "length")
    assert choice.message == {"role": "assistant", "content": "hi"}


@pytest.mark.parametrize(
    "name, odd",
    [
        ("token_ids", '["7"]'),
        ("logprobs", '{"token_logprobs":[null,-0.5]}'),
        ("logprobs", '{"token_logprobs":["a"]}'),
        ("logprobs", "[-0.5]"),
        ("prompt_token_ids", '["5"]'),
        ("prompt_token_ids", "5"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_odd_evidence_of_one_choice_is_named(name: str, odd: str, stream: bool) -> None:
    body = encoded(_whole(_choice(0, **{name: ODD}), _choice(2)), odd)
    if stream:
        reader = StreamReader(4, batch=_BATCH)
        reader.read(body)
        completion = reader.rest()
    else:
        completion = read_completion(body, batch=_BATCH)
    assert _problems(completion) == [name, ""]
    assert completion.choices[1].ids == [7, 2]


def test_text_without_ids_makes_the_ids_unknown() -> None:
    completion = read_completion(encoded(_whole(_choice(0, token_ids=None))), batch=_BATCH)
    assert completion.choices[0].ids is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_of_generate(stream: bool) -> None:
    logprobs = {"content": [{"token_id": token, "logprob": -0.5, "rank": 1} for token in (7, 2)]}
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": [7, 2],
        "logprobs": logprobs,
        "sampling_mask": [[7, 8], [2]],
        "weight_versions": [{"version": "a", "start": 0, "end": 2}],
    }
    body = encoded({"request_id": "g", "choices": [choice], "prompt_token_ids": [5, 6]})
    if stream:
        reader = StreamReader()
        reader.read(body)
        completion = reader.ended()
    else:
        completion = read_completion(body)
    [sampled] = completion.choices
    assert completion.prompt_ids == b"[5,6]"
    assert (sampled.ids, sampled.logprobs) == ([7, 2], [-0.5, -0.5])
    assert sampled.sampling_mask == [[7, 8], [2]]
    assert sampled.weight_versions == (WeightSpan("a", 0, 2),)
    assert sampled.message == {"role": "assistant", "content": None}


def test_masks_of_a_stream_are_joined() -> None:
    reader = StreamReader()
    for end, mask in ((None, [[7, 8]]), ("stop", [[2], [3, 4]])):
        reader.read(encoded({"choices": [{"token_ids": [1], "finish_reason": end, "sampling_mask": mask}]}))
    assert reader.ended().choices[0].sampling_mask == [[7, 8], [2], [3, 4]]
