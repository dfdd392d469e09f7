"""What is read of completions: of sound ones everything, of odd ones what can be read."""

from typing import Any
from unittest.mock import ANY

import msgspec
import pytest

from tests.unit.turn.bodies import (
    ODD,
    Body,
    CompletionReader,
    chunk,
    encoded,
    end,
    logprobs_of,
    piece,
    read_completion,
    whole,
    whole_choice,
)
from tokenproxy.base.errors import EngineBroken
from tokenproxy.record.completion import Batch, Completion, SampledChoice, untrainable_reason
from tokenproxy.record.turn import WeightSpan, pack_ids, pack_logprobs
from tokenproxy.record.vocabulary import ABORTED, Problem
from tokenproxy.turn.wire import NO_REASON

_BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
_HI = {"role": "assistant", "content": "hi"}


def _streamed(*chunks: Body, expected: int = 1, odd: str = "") -> Completion:
    reader = CompletionReader(expected)
    for one in chunks:
        reader.read(encoded(one, odd))
    return reader.rest()


def _read(stream: bool, odd: str = "", top: Any = None, **fields: Any) -> Completion:
    """A completion of one choice, whole or as a stream of one chunk; `top` and `fields` replace its own."""
    if stream:
        body = {"prompt_token_ids": [5, 6], "usage": {"completion_tokens": 2}, **(top or {})}
        last = end(**{"ids": [7, 2], "delta": {"content": "hi"}, **fields})
        completion = _streamed(chunk(last, **body), odd=odd)
    else:
        completion = read_completion(encoded(whole(whole_choice(**fields), **(top or {})), odd))
    for choice in completion.choices:  # it can be stored
        msgspec.json.encode(choice.message)
        msgspec.msgpack.encode((choice.finish_reason, choice.stop_reason, choice.weight_versions))
        pack_ids(choice.ids or ())
        pack_logprobs(choice.logprobs or ())
    return completion


def _problem(completion: Completion) -> Problem | None:
    return untrainable_reason(completion, completion.choices[0], b"", media=False)


def _indices(completion: Completion) -> list[tuple[int, str]]:
    """The index of each choice, and the name of its evidence that could not be read."""
    return [(choice.index, choice.unreadable) for choice in completion.choices]


# --- sound completions


@pytest.mark.parametrize("spaced", [False, True])
def test_a_whole_completion(spaced: bool) -> None:
    spans = [{"version": 3, "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 2}]
    choice = whole_choice(stop_reason="</s>", routed_experts="AAAA", weight_versions=spans)
    completion = read_completion(encoded(whole(choice), spaced=spaced))
    assert completion.prompt_ids == (b"[5, 6]" if spaced else b"[5,6]")
    assert completion.completion_tokens == 2
    weights = (WeightSpan("3", 0, 1), WeightSpan("b", 1, 2))
    expected = SampledChoice(0, _HI, [7, 2], [-0.5, -0.25], "stop", "</s>", weight_versions=weights)
    expected.counted = 2
    expected.facts = {"weight_versions": ANY, "routed_experts": "AAAA"}
    assert completion.choices == [expected]
    assert _problem(completion) is None


def test_a_stream_that_breaks_off() -> None:
    """Usage counts the ids of a single choice only."""
    reader = CompletionReader(expected=2)
    reader.read(encoded(chunk(piece(0), piece(1), usage={"completion_tokens": 9})))
    reader.read(encoded(chunk(end(1), usage={"completion_tokens": 2})))
    reader.read(encoded({"error": "gone", "choices": [end(ids=[9])], "prompt_token_ids": [1]}))
    choices = reader.rest().choices
    assert [(choice.finish_reason, choice.counted) for choice in choices] == [(ABORTED, None), ("stop", 2)]
    assert [choice.ids for choice in choices] == [[7], [7, 2]]
    assert reader.rest() == Completion()
    assert reader.failed and not reader.complete


@pytest.mark.parametrize(
    "delta, ids",
    [
        ({"role": "assistant", "content": ""}, [7, 2]),
        (None, [7, 2]),
        ({"content": "h"}, None),
        ({"reasoning": "h"}, None),
    ],
)
def test_text_without_ids_makes_the_ids_worthless(delta: object, ids: list[int] | None) -> None:
    completion = _streamed(chunk(piece()), chunk(piece(ids=None, delta=delta)), chunk(end()))
    assert (completion.choices[0].ids, completion.choices[0].unreadable) == (ids, "")


def test_pieces_of_a_message_are_joined() -> None:
    def call(index: int, **function: str) -> Body:
        return {"index": index, "function": function}

    deltas: list[Body] = [
        {"role": "assistant", "content": "a", "reasoning": "so ", "reasoning_content": "so "},
        {"content": None, "reasoning": "it", "reasoning_content": "it", "refusal": "no"},
        {"content": "b", "tool_calls": [{**call(1, name="g", arguments=""), "id": "two"}]},
        {"tool_calls": [{**call(0, name="f", arguments='{"x'), "id": "one", "type": "function"}]},
        {"tool_calls": [call(0, arguments='":1}'), {"index": 1, "id": ""}]},
    ]
    completion = _streamed(*[chunk(piece(delta=delta)) for delta in deltas])
    functions = [{"name": "f", "arguments": '{"x":1}'}, {"name": "g", "arguments": ""}]
    calls = [{"type": "function", "function": functions[at], "id": ("one", "two")[at]} for at in (0, 1)]
    expected = {"role": "assistant", "content": "ab", "reasoning": "so it", "reasoning_content": "so it"}
    assert completion.choices[0].message == {**expected, "refusal": "no", "tool_calls": calls}


def test_only_the_completions_own_prompt_counts() -> None:
    odd = whole_choice(message={"content": '"prompt_token_ids":[9]'}, prompt_token_ids=[9])
    for echoed, expected in (([5, 6], b"[5,6]"), (None, None)):
        body = {'"prompt_token_ids': [9], **whole(odd, prompt_token_ids=echoed)}
        assert read_completion(encoded(body)).prompt_ids == expected


# --- odd shapes

_ODD_EVIDENCE: dict[str, tuple[str, ...]] = {
    "token_ids": ("[7.5]", "[-2]", "[2147483648]", f"[{'1' * 5000}]", "[[7]]", "[NaN]", '"7"'),
    "prompt_token_ids": ('["]","["]', "[-2]", "[2147483648]", "false"),
    "logprobs": (
        *("[-0.5]", '{"content":[{"logprob":null}]}'),
        f'{{"content":[{{"logprob":-1{"0" * 400}}}]}}',
    ),
    "index": ('"0"', "-1", "65536"),
}


@_BOTH
@pytest.mark.parametrize("name, odd", [(name, odd) for name in _ODD_EVIDENCE for odd in _ODD_EVIDENCE[name]])
def test_odd_evidence_is_named_and_the_rest_is_read(name: str, odd: str, stream: bool) -> None:
    fields = {name: ODD}
    completion = _read(stream, odd, fields) if name == "prompt_token_ids" else _read(stream, odd, **fields)
    (choice,) = completion.choices
    assert (choice.index, choice.unreadable) == (0, name)
    assert completion.prompt_ids == (None if name == "prompt_token_ids" else b"[5,6]")
    assert choice.ids == (None if name == "token_ids" else [7, 2])
    assert (choice.logprobs is None) == (name == "logprobs")
    assert (choice.message["content"], choice.finish_reason) == ("hi", "stop")
    assert _problem(completion) is Problem.UNREADABLE_EVIDENCE


@_BOTH
@pytest.mark.parametrize("odd", ["NaN", "-Infinity", "1e39"])
def test_logprobs_that_are_not_finite(stream: bool, odd: str) -> None:
    """Or not in the precision in which they are stored. The rest of the body is read as ever."""
    completion = _read(stream, odd, logprobs=logprobs_of(-0.5, ODD))
    (choice,) = completion.choices
    assert (completion.prompt_ids, choice.ids, choice.unreadable) == (b"[5,6]", [7, 2], "")
    assert choice.logprobs is not None
    assert (choice.logprobs[0], len(choice.logprobs)) == (-0.5, 2)
    assert _problem(completion) is Problem.LOGPROBS_NOT_FINITE


@pytest.mark.parametrize(
    "given, read",
    [
        ([None], [(0, "")]),
        ([None, 0, None], [(0, "index")]),
        ([1, 1, 0], [(1, "index"), (0, "index")]),
        ([ODD, 0], [(0, "index")]),
    ],
)
def test_choices_whose_indices_are_not_sure_are_not_trained_on(given: list[Any], read: Any) -> None:
    assert _indices(read_completion(encoded(whole(*map(whole_choice, given)), '"0"'))) == read


def test_indices_of_a_stream_that_are_not_sure() -> None:
    assert _indices(_streamed(chunk(end(None)))) == [(0, "")]
    completion = _streamed(chunk(end(None)), chunk(end(1)), expected=2)
    assert _indices(completion) == [(0, "index"), (1, "")]
    assert _indices(_streamed(chunk(end(0), end(None)))) == [(0, "index")]


_OPTIONAL: dict[str, tuple[str, ...]] = {
    "stop_reason": ("[]", "1" * 30),
    "routed_experts": ("{}",),
    "weight_versions": ("[1]", '[{"version":"v"}]', '[{"version":"v","start":-1,"end":1}]'),
    "unknown": ("NaN", '{"\\udfff":"\\ud800"}'),
}


@_BOTH
@pytest.mark.parametrize("name, odd", [(name, odd) for name, values in _OPTIONAL.items() for odd in values])
def test_an_odd_optional_field_is_left_out(stream: bool, name: str, odd: str) -> None:
    completion = _read(stream, odd, **{name: ODD})
    assert completion == _read(stream)
    assert _problem(completion) is None


@pytest.mark.parametrize(
    "odd, reason", [("7", NO_REASON), ('["stop"]', NO_REASON), ("0", None), ("[]", None)]
)
def test_an_odd_finish_reason_ends_a_choice_unless_it_is_empty(odd: str, reason: str | None) -> None:
    (choice,) = _read(False, odd, finish_reason=ODD).choices
    assert (choice.finish_reason, choice.ids) == (reason or ABORTED, [7, 2])
    reader = CompletionReader()
    reader.read(encoded(chunk(end(finish_reason=ODD)), odd))
    assert [choice.finish_reason for choice in reader.rest(ended=True).choices] == (
        [reason] if reason else []
    )


_NESTED = encoded(whole(usage="3", more=ODD), "[" * 100_000 + "]" * 100_000)


@pytest.mark.parametrize("body", [b"", b"[{}]", b'{"choices":[', b"[" * 100_000, _NESTED], ids=range(5))
def test_completion_that_is_not_an_object(body: bytes) -> None:
    for read in (read_completion, CompletionReader().read):
        with pytest.raises(EngineBroken, match="the engine's response is not a chat completion"):
            read(body)


# --- completions with several prompts

_BATCH = Batch((b"[5,6]", b""), 2)


def _text_choice(index: int, **fields: Any) -> Body:
    """A choice of the completions route, whole or a piece."""
    logprobs = {"tokens": ["h", "i"], "token_logprobs": [-0.5, -0.25], "top_logprobs": [], "text_offset": []}
    choice = {"index": index, "text": "hi", "logprobs": logprobs, "finish_reason": "stop"}
    return {**choice, "token_ids": [7, 2], "prompt_token_ids": [5, 6] if index < 2 else [8], **fields}


def _texts(*choices: Body, counted: int = 8) -> bytes:
    return encoded({"id": "c", "choices": list(choices), "usage": {"completion_tokens": counted}})


@pytest.mark.parametrize("counted, of_part", [(8, 4), (9, 5)])
def test_each_choice_has_its_prompt(counted: int, of_part: int) -> None:
    """A wrong number of ids shows in each part."""
    completion = read_completion(_texts(*map(_text_choice, range(4)), counted=counted), batch=_BATCH)
    assert [choice.prompt_ids for choice in completion.choices] == [b"[5,6]"] * 2 + [b"[8]"] * 2
    assert completion.prompt_ids is None
    assert completion.choices[3] == SampledChoice(3, _HI, [7, 2], [-0.5, -0.25], "stop", prompt_ids=b"[8]")
    parts = completion.by_prompt(_BATCH)
    assert {position: part.prompt_ids for position, part in parts.items()} == {0: b"[5,6]", 1: b"[8]"}
    assert [[choice.index for choice in parts[at].choices] for at in (0, 1)] == [[0, 1], [2, 3]]
    assert [parts[at].completion_tokens for at in (0, 1)] == [of_part, of_part]
    (choice,) = read_completion(_texts(_text_choice(0, token_ids=None)), batch=_BATCH).choices
    assert choice.ids is None  # text without ids


def test_pieces_of_texts_are_joined_and_the_first_echo_of_a_prompt_is_that_of_its_choices() -> None:
    """vLLM's streams echo a prompt once, with the choice that comes first."""
    reader = CompletionReader(4, batch=_BATCH)
    for index in (1, 0, 3, 2):
        echo = {1: [5, 6], 3: [8]}.get(index)
        for text, ids, reason in (("h", [7], None), ("i", [], None), ("", [2], "length")):
            part = {"text": text, "token_ids": ids, "finish_reason": reason, "prompt_token_ids": echo}
            reader.read(_texts(_text_choice(index, **part, logprobs={"token_logprobs": [-0.5] * len(ids)})))
    assert reader.complete
    choices = sorted(reader.rest(ended=True).choices, key=lambda choice: choice.index)
    assert [choice.prompt_ids for choice in choices] == [b"[5,6]", b"[5,6]", b"[8]", b"[8]"]
    for choice in choices:
        assert (choice.ids, choice.logprobs, choice.finish_reason) == ([7, 2], [-0.5, -0.5], "length")
        assert choice.message == _HI
