"""What is read of completions: of sound ones everything, of odd ones what can be read."""

import msgspec
import pytest

from proxy.errors import EngineBroken
from proxy.history.completion import Completion, SampledChoice, untrainable_reason
from proxy.history.turn import WeightSpan, pack_ids, pack_logprobs
from proxy.history.vocabulary import ABORTED, Problem
from proxy.turn.chunk import NO_REASON
from proxy.turn.reader import StreamReader, read_completion
from tests.unit.turn.bodies import ODD, Body, chunk, encoded, end, logprobs_of, piece, whole, whole_choice


def _streamed(*chunks: Body, expected: int = 1, odd: str = "") -> Completion:
    reader = StreamReader(expected)
    for one in chunks:
        reader.read(encoded(one, odd))
    return reader.rest()


def _problem(completion: Completion) -> Problem | None:
    return untrainable_reason(completion, completion.choices[0], b"", media=False)


# --- sound completions


@pytest.mark.parametrize("spaced", [False, True])
def test_a_whole_completion(spaced: bool) -> None:
    spans = [{"version": 3, "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 2}]
    choice = whole_choice(stop_reason="</s>", routed_experts="AAAA", weight_versions=spans)
    completion = read_completion(encoded(whole(choice), spaced=spaced))
    assert completion.prompt_ids == (b"[5, 6]" if spaced else b"[5,6]")
    assert completion.completion_tokens == 2
    assert completion.choices == [
        SampledChoice(
            message={"role": "assistant", "content": "hi"},
            ids=[7, 2],
            logprobs=[-0.5, -0.25],
            finish_reason="stop",
            stop_reason="</s>",
            weight_versions=(WeightSpan("3", 0, 1), WeightSpan("b", 1, 2)),
            routed_experts="AAAA",
        )
    ]
    assert _problem(completion) is None


def test_few_ids_that_were_parsed_are_packed() -> None:
    body = encoded(whole(whole_choice()))
    assert read_completion(body).packed_prompt == pack_ids([5, 6])
    assert read_completion(body, sent=b"[5,6]").packed_prompt is None


@pytest.mark.parametrize("last", [[1, 2], list(range(20_000))], ids=["as sent", "many ids"])
def test_packed_ids_are_those_of_the_last_echo(last: list[int]) -> None:
    reader = StreamReader(sent=b"[1,2]")
    reader.read(encoded(chunk(piece(), prompt_token_ids=[5, 6])))
    reader.read(encoded(chunk(piece(), prompt_token_ids=last)))
    completion = reader.rest()
    assert (completion.prompt_ids, completion.packed_prompt) == (encoded(last), None)


def test_a_completion_without_evidence() -> None:
    body = whole(whole_choice(token_ids=None, logprobs=None), prompt_token_ids=None, usage=None)
    completion = read_completion(encoded(body))
    (choice,) = completion.choices
    assert (completion.prompt_ids, completion.completion_tokens) == (None, None)
    assert (choice.ids, choice.logprobs, choice.unreadable) == (None, None, "")


def test_a_stream() -> None:
    first = chunk(
        piece(text="", ids=None, delta={"role": "assistant", "content": ""}), prompt_token_ids=[5, 6]
    )
    completion = _streamed(
        first,
        chunk(piece(text="h", ids=[7, 8]), usage={"completion_tokens": 2}),
        chunk(piece(text="i", ids=[9]), usage={"completion_tokens": 3}),
        chunk(end(stop_reason=2, ids=[2]), usage={"completion_tokens": 4}),
        chunk(usage={"completion_tokens": 4}),
    )
    assert completion == Completion(
        b"[5,6]",
        [
            SampledChoice(
                message={"role": "assistant", "content": "hi"},
                ids=[7, 8, 9, 2],
                logprobs=[-0.5] * 4,
                finish_reason="stop",
                stop_reason=2,
                counted=4,
            )
        ],
    )
    assert _problem(completion) is None


def test_a_choice_is_returned_when_it_ends() -> None:
    reader = StreamReader(expected=2)
    reader.read(encoded(chunk(piece(0), piece(1))))
    assert reader.ended().choices == []
    reader.read(encoded(chunk(end(1))))
    assert [choice.index for choice in reader.ended().choices] == [1]
    assert reader.ended().choices == []
    assert not reader.complete
    reader.read(encoded(chunk(end(0))))
    assert reader.complete
    assert [choice.index for choice in reader.ended().choices] == [0]
    assert reader.rest().choices == []


def test_a_choice_that_was_returned_does_not_change() -> None:
    reader = StreamReader()
    reader.read(encoded(chunk(end(ids=[7]))))
    (choice,) = reader.ended().choices
    reader.read(encoded(chunk(end(ids=[9], finish_reason="length"))))
    assert reader.ended().choices == reader.rest().choices == []
    assert (choice.ids, choice.finish_reason) == ([7], "stop")


def test_a_stream_that_breaks_off() -> None:
    reader = StreamReader(expected=2)
    reader.read(encoded(chunk(piece(0), end(1))))
    assert [choice.finish_reason for choice in reader.rest().choices] == [ABORTED, "stop"]
    assert reader.rest().choices == []
    assert not reader.complete


def test_broken_stream_is_not_complete() -> None:
    reader = StreamReader()
    reader.read(encoded(chunk(piece())))
    assert reader.rest().choices[0].finish_reason == ABORTED
    assert not reader.complete


def test_usage_counts_only_a_single_choice() -> None:
    completion = _streamed(
        chunk(piece(0), piece(1), usage={"completion_tokens": 9}),
        chunk(end(0), usage={"completion_tokens": 2}),
        chunk(end(1)),
        expected=2,
    )
    assert [choice.counted for choice in completion.choices] == [2, None]
    assert completion.completion_tokens is None


def test_text_without_ids_makes_the_ids_worthless() -> None:
    completion = _streamed(chunk(piece(ids=[7])), chunk(piece(ids=None)), chunk(end()))
    assert completion.choices[0].ids is None
    assert completion.choices[0].unreadable == ""


@pytest.mark.parametrize("delta", [{"role": "assistant", "content": ""}, {}, None])
def test_empty_piece_needs_no_ids(delta: object) -> None:
    completion = _streamed(chunk(piece(ids=None, delta=delta)), chunk(end(ids=[2])))
    assert completion.choices[0].ids == [2]


def test_a_message_is_assembled_as_the_openai_sdk_does() -> None:
    deltas: list[Body] = [
        {"role": "assistant", "content": None},
        {"reasoning": "so", "reasoning_content": "so"},
        {"reasoning": " it", "reasoning_content": " it"},
        {"content": "a", "refusal": "n"},
        {"content": "b", "refusal": "o"},
        {"tool_calls": [{"index": 1, "id": "two", "function": {"name": "g", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "id": "one", "type": "function", "function": {"name": "f"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '":1}'}}, {"index": 1, "id": ""}]},
    ]
    completion = _streamed(*[chunk(piece(delta=delta)) for delta in deltas])
    assert completion.choices[0].message == {
        "role": "assistant",
        "content": "ab",
        "reasoning": "so it",
        "reasoning_content": "so it",
        "refusal": "no",
        "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": '{"x":1}'}, "id": "one"},
            {"type": "function", "function": {"name": "g", "arguments": ""}, "id": "two"},
        ],
    }


def test_an_error_of_the_engine_is_passed_over() -> None:
    reader = StreamReader()
    reader.read(encoded(chunk(piece())))
    reader.read(encoded({"error": {"message": "out of memory", "code": 500}}))
    reader.read(encoded({"error": "gone", "choices": [end(ids=[9])], "prompt_token_ids": [1]}))
    completion = reader.rest()
    assert (completion.prompt_ids, completion.choices[0].ids) == (None, [7])


# --- the echoed prompt


_ELSEWHERE: dict[str, Body] = {
    "in a choice": whole(whole_choice(prompt_token_ids=[9]), prompt_token_ids=None),
    "in a choice and at its place": whole(whole_choice(prompt_token_ids=[9])),
    "in a choice alone": {"choices": [whole_choice(prompt_token_ids=[9])]},
    "as the end of another name": {'"prompt_token_ids': [9], **whole()},
    "in a text": whole(whole_choice(message={"content": '"prompt_token_ids":[9]'})),
}


@pytest.mark.parametrize("body", _ELSEWHERE.values(), ids=_ELSEWHERE)
def test_only_the_completions_own_prompt_counts(body: Body) -> None:
    echoed = body.get("prompt_token_ids")
    completion = read_completion(encoded(body))
    assert completion.prompt_ids == (encoded(echoed) if echoed else None)
    assert completion.choices[0].message == body["choices"][0]["message"]
    assert completion.choices[0].unreadable == ""


def test_echo_equal_to_the_sent_prompt() -> None:
    body = encoded(whole())
    assert read_completion(body, b"[5,6]") == read_completion(body, b"[5]") == read_completion(body)
    reader = StreamReader(sent=b"[5,6]")
    reader.read(encoded(chunk(end(), prompt_token_ids=[5, 6])))
    assert reader.ended().prompt_ids == b"[5,6]"


# --- odd evidence


_ODD_IDS = {
    "strings": '["7","2"]',
    "brackets in strings": '["]","["]',
    "floats": "[7.0,2.0]",
    "fractions": "[7.5,2.5]",
    "booleans": "[true,false]",
    "null among them": "[7,null]",
    "too large": "[7,2147483648]",
    "far too large": "[7,1000000000000000000000000000000]",
    "larger than what Python parses": f"[7,{'1' * 5000}]",
    "with an exponent": "[7,1e999]",
    "negative": "[7,-2]",
    "lists": "[[7],[2]]",
    "objects": '[{"id":7}]',
    "not a number": "[NaN]",
    "infinite": "[7,-Infinity]",
    "a string": '"7,2"',
    "a number": "7",
    "false": "false",
    "an object": '{"0":7}',
    "a lone surrogate": '"\\ud800"',
}
_ODD_LOGPROBS = {
    "a string": '"-0.5"',
    "a list": "[-0.5,-0.25]",
    "a number": "-0.5",
    "true": "true",
    "content is a string": '{"content":"-0.5"}',
    "content is an object": '{"content":{"logprob":-0.5}}',
    "content holds numbers": '{"content":[-0.5,-0.25]}',
    "content holds null": '{"content":[null]}',
    "null": '{"content":[{"logprob":null}]}',
    "strings": '{"content":[{"logprob":"-0.5"},{"logprob":"-Infinity"}]}',
    "booleans": '{"content":[{"logprob":true},{"logprob":false}]}',
    "lists": '{"content":[{"logprob":[-0.5]}]}',
    "missing": '{"content":[{"token":"t"}]}',
    "too large an integer": f'{{"content":[{{"logprob":-1{"0" * 400}}}]}}',
}
_NOT_FINITE = ("NaN", "Infinity", "-Infinity", "-1e999", "1e39", "-" + "1" * 5000 + ".0")
_ODD_INDEX = ('"0"', "-1", "1.0", "0.5", "65536", "1" * 5000, "NaN", "true", "[]", "{}")


@pytest.mark.parametrize("odd", _ODD_IDS.values(), ids=_ODD_IDS)
def test_odd_ids(odd: str) -> None:
    completion = read_completion(encoded(whole(whole_choice(token_ids=ODD)), odd))
    (choice,) = completion.choices
    assert (choice.unreadable, choice.ids) == ("token_ids", None)
    assert (choice.logprobs, choice.message["content"], choice.finish_reason) == ([-0.5, -0.25], "hi", "stop")
    assert (completion.prompt_ids, completion.completion_tokens) == (b"[5,6]", 2)
    assert _problem(completion) is Problem.UNREADABLE_EVIDENCE
    _can_be_stored(completion)


@pytest.mark.parametrize("odd", _ODD_IDS.values(), ids=_ODD_IDS)
@pytest.mark.parametrize("text", ["i", None])
def test_odd_ids_in_a_stream(text: str | None, odd: str) -> None:
    prompt = chunk(piece(), prompt_token_ids=[5, 6])
    completion = _streamed(prompt, chunk(piece(text=text, ids=ODD)), chunk(end()), odd=odd)
    (choice,) = completion.choices
    assert (choice.unreadable, choice.ids) == ("token_ids", None)
    assert (choice.message["content"], choice.finish_reason) == ("h" + (text or ""), "stop")
    assert _problem(completion) is Problem.UNREADABLE_EVIDENCE
    _can_be_stored(completion)


@pytest.mark.parametrize("odd", _ODD_LOGPROBS.values(), ids=_ODD_LOGPROBS)
def test_odd_logprobs(odd: str) -> None:
    completion = read_completion(encoded(whole(whole_choice(logprobs=ODD)), odd))
    (choice,) = completion.choices
    assert (choice.unreadable, choice.ids, choice.logprobs) == ("logprobs", [7, 2], None)
    assert _problem(completion) is Problem.UNREADABLE_EVIDENCE


@pytest.mark.parametrize("odd", _ODD_LOGPROBS.values(), ids=_ODD_LOGPROBS)
def test_odd_logprobs_in_a_stream(odd: str) -> None:
    prompt = chunk(piece(), prompt_token_ids=[5, 6])
    completion = _streamed(prompt, chunk(piece(logprobs=ODD)), chunk(end()), odd=odd)
    (choice,) = completion.choices
    assert (choice.unreadable, choice.ids, choice.logprobs) == ("logprobs", [7, 7, 2], None)
    assert _problem(completion) is Problem.UNREADABLE_EVIDENCE


@pytest.mark.parametrize("odd", _NOT_FINITE)
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_that_are_not_finite(stream: bool, odd: str) -> None:
    """Or none in the precision in which they are stored. The rest of the body is read as ever."""
    logprobs = logprobs_of(-0.5, ODD)
    if stream:
        fields = {"prompt_token_ids": [5, 6], "usage": {"completion_tokens": 2}}
        completion = _streamed(chunk(end(ids=[7, 2], logprobs=logprobs), **fields), odd=odd)
    else:
        completion = read_completion(encoded(whole(whole_choice(logprobs=logprobs)), odd))
    (choice,) = completion.choices
    assert (completion.prompt_ids, choice.ids, choice.unreadable) == (b"[5,6]", [7, 2], "")
    assert choice.logprobs is not None
    assert (choice.logprobs[0], len(choice.logprobs)) == (-0.5, 2)
    assert _problem(completion) is Problem.LOGPROBS_NOT_FINITE
    _can_be_stored(completion)


def test_logprobs_of_null_are_none() -> None:
    (choice,) = read_completion(encoded(whole(whole_choice(logprobs={"content": None})))).choices
    assert (choice.logprobs, choice.unreadable) == (None, "")


@pytest.mark.parametrize("odd", [*_ODD_IDS.values(), "[5,,6]", "[05,6]", "[5 6]"])
def test_an_odd_prompt(odd: str) -> None:
    completion = read_completion(encoded(whole(prompt_token_ids=ODD), odd))
    assert (completion.prompt_ids, completion.choices[0].unreadable) == (None, "prompt_token_ids")
    assert completion.choices[0].ids == [7, 2]
    assert _problem(completion) is Problem.UNREADABLE_EVIDENCE


@pytest.mark.parametrize("odd", _ODD_IDS.values(), ids=_ODD_IDS)
def test_an_odd_prompt_in_a_stream(odd: str) -> None:
    completion = _streamed(chunk(piece(), prompt_token_ids=ODD), chunk(end()), odd=odd)
    assert (completion.prompt_ids, completion.choices[0].unreadable) == (None, "prompt_token_ids")
    assert completion.choices[0].ids == [7, 2]
    assert _problem(completion) is Problem.UNREADABLE_EVIDENCE


@pytest.mark.parametrize("odd", _ODD_INDEX)
def test_an_odd_index(odd: str) -> None:
    completion = read_completion(encoded(whole(whole_choice(ODD), whole_choice(0)), odd))
    assert [choice.index for choice in completion.choices] == [1, 0]
    assert [choice.unreadable for choice in completion.choices] == ["index", ""]
    assert _problem(completion) is Problem.UNREADABLE_EVIDENCE


@pytest.mark.parametrize("odd", _ODD_INDEX)
def test_an_odd_index_in_a_stream(odd: str) -> None:
    reader = StreamReader()
    reader.read(encoded(chunk(piece(ODD)), odd))
    reader.read(encoded(chunk(end(ODD)), odd))
    (choice,) = reader.ended().choices
    assert reader.complete
    assert (choice.index, choice.ids, choice.unreadable) == (0, [7, 2], "index")


@pytest.mark.parametrize("missing", [{}, {"index": None}])
def test_the_index_of_an_only_choice_may_be_missing(missing: Body) -> None:
    only = {name: value for name, value in whole_choice().items() if name != "index"} | missing
    (choice,) = read_completion(encoded(whole(only))).choices
    assert (choice.index, choice.unreadable) == (0, "")
    only = {name: value for name, value in end().items() if name != "index"} | missing
    (choice,) = _streamed(chunk(only)).choices
    assert (choice.index, choice.unreadable) == (0, "")


def test_the_index_of_one_among_several_must_not_be_missing() -> None:
    completion = read_completion(encoded(whole(whole_choice(None), whole_choice(0), whole_choice(None))))
    assert [choice.index for choice in completion.choices] == [1, 0, 2]
    assert [choice.unreadable for choice in completion.choices] == ["index", "", "index"]
    completion = _streamed(chunk(end(None)), chunk(end(1)), expected=2)
    assert [(choice.index, choice.unreadable) for choice in completion.choices] == [(0, "index"), (1, "")]


def test_an_index_that_two_choices_have() -> None:
    completion = read_completion(encoded(whole(whole_choice(1), whole_choice(1), whole_choice(0))))
    assert [choice.index for choice in completion.choices] == [1, 2, 0]
    assert [choice.unreadable for choice in completion.choices] == ["", "index", ""]
    completion = _streamed(chunk(piece(1), piece(1)), chunk(end(1)), chunk(end(0)), expected=2)
    assert [(choice.index, choice.unreadable) for choice in completion.choices] == [(1, "index"), (0, "")]
    (choice,) = _streamed(chunk(end(0), end(None))).choices
    assert choice.unreadable == "index"


# --- odd fields that are no evidence


_OPTIONAL: dict[str, tuple[str, ...]] = {
    "stop_reason": ("[]", '["</s>"]', "{}", "true", "1.5", "NaN", "1" * 30),
    "routed_experts": ("{}", '{"a":1}', "[[1]]", "7", "true"),
    "weight_versions": (
        '"v"',
        "{}",
        "[1]",
        '[{"version":"v"}]',
        '[{"version":[],"start":0,"end":1}]',
        '[{"version":"v","start":-1,"end":1}]',
        '[{"version":"v","start":0,"end":1.5}]',
        '[{"version":"v","start":0,"end":2147483648}]',
        '[{"version":true,"start":0,"end":1}]',
        f'[{{"version":{"1" * 5000},"start":0,"end":1}}]',
        "NaN",
    ),
    "message": ('"hi"', "[]", "7", "true", '["hi"]'),
    "delta": ("[]", "0", "false", '""'),
    "usage": ('"3"',),
}
_LEFT_OUT = [(name, odd) for name, values in _OPTIONAL.items() for odd in values]


@pytest.mark.parametrize("name, odd", _LEFT_OUT)
@pytest.mark.parametrize("stream", [False, True])
def test_an_odd_optional_field_is_left_out(stream: bool, name: str, odd: str) -> None:
    if stream:
        completion = _streamed(chunk(end(**{name: ODD}), prompt_token_ids=[5, 6]), odd=odd)
        expected = _streamed(chunk(end(), prompt_token_ids=[5, 6]))
    else:
        completion = read_completion(encoded(whole(whole_choice(**{name: ODD})), odd))
        message = {} if name == "message" else whole_choice()["message"]
        expected = read_completion(encoded(whole(whole_choice(message=message))))
    assert completion == expected
    assert _problem(completion) is None
    _can_be_stored(completion)


@pytest.mark.parametrize(
    "odd",
    ('"2"', "2", "[]", '{"completion_tokens":"2"}', '{"completion_tokens":-2}', '{"completion_tokens":2.0}'),
)
def test_malformed_usage_is_ignored(odd: str) -> None:
    completion = read_completion(encoded(whole(usage=ODD), odd))
    assert (completion.completion_tokens, completion.choices[0].unreadable) == (None, "")
    assert completion.choices[0].ids == [7, 2]
    (choice,) = _streamed(chunk(end(), usage=ODD), odd=odd).choices
    assert (choice.counted, choice.ids, choice.unreadable) == (None, [2], "")


@pytest.mark.parametrize("odd", ("7", "true", '["stop"]', '{"type":"stop"}', "Infinity"))
def test_an_odd_finish_reason_ends_a_choice(odd: str) -> None:
    (choice,) = read_completion(encoded(whole(whole_choice(finish_reason=ODD)), odd)).choices
    assert (choice.finish_reason, choice.ids) == (NO_REASON, [7, 2])
    reader = StreamReader()
    reader.read(encoded(chunk(end(finish_reason=ODD)), odd))
    (choice,) = reader.ended().choices
    assert (choice.finish_reason, choice.ids, choice.unreadable) == (NO_REASON, [2], "")


@pytest.mark.parametrize("odd", ('""', "false", "0", "[]", "{}", "null"))
def test_an_empty_finish_reason_is_none(odd: str) -> None:
    (choice,) = read_completion(encoded(whole(whole_choice(finish_reason=ODD)), odd)).choices
    assert choice.finish_reason is None
    reader = StreamReader()
    reader.read(encoded(chunk(piece(finish_reason=ODD)), odd))
    assert reader.ended().choices == []
    assert [choice.ids for choice in reader.rest().choices] == [[7]]


@pytest.mark.parametrize("odd", ('"text"', "[1]", "7"))
def test_an_odd_delta_without_ids_makes_the_ids_worthless(odd: str) -> None:
    (choice,) = _streamed(chunk(piece(ids=None, delta=ODD)), chunk(end()), odd=odd).choices
    assert choice.ids is None
    (choice,) = _streamed(chunk(piece(ids=[7], delta=ODD)), chunk(end()), odd=odd).choices
    assert (choice.ids, choice.unreadable) == ([7, 2], "")


_ODD_CALLS: dict[str, str] = {
    "a string": '"f"',
    "an object": '{"index":0}',
    "strings": '["f",null,7,[]]',
    "without an index": '[{"id":"a","function":{"name":"f","arguments":"{}"}}]',
    "index of null": '[{"index":null,"id":"a"}]',
    "indices of different kinds": '[{"index":"0"},{"index":1},{"index":[]},{"index":{}},{"index":true}]',
    "an odd identity": '[{"index":0,"id":7,"type":{}}]',
    "an odd function": '[{"index":0,"function":"f"},{"index":1,"function":[1]}]',
    "an odd name": '[{"index":0,"function":{"name":7,"arguments":{"x":1}}}]',
    "a number": "7",
}


@pytest.mark.parametrize("odd", _ODD_CALLS.values(), ids=_ODD_CALLS)
def test_odd_tool_calls(odd: str) -> None:
    calls = {"role": "assistant", "content": "hi", "tool_calls": ODD}
    (choice,) = read_completion(encoded(whole(whole_choice(message=calls)), odd)).choices
    assert (choice.ids, choice.unreadable) == ([7, 2], "")
    completion = _streamed(chunk(piece(delta=calls)), chunk(end()), odd=odd)
    (choice,) = completion.choices
    assert (choice.ids, choice.unreadable, choice.message["content"]) == ([7, 2], "", "hi")
    for call in choice.message.get("tool_calls", []):
        assert (call["type"], type(call["function"])) == ("function", dict)
    _can_be_stored(completion)


@pytest.mark.parametrize("odd", ('"a"', "7", "true", "null", "{}", '{"0":{"token_ids":[7]}}', "NaN"))
def test_choices_that_are_not_a_list(odd: str) -> None:
    completion = read_completion(encoded(whole(choices=ODD), odd))
    assert (completion.prompt_ids, completion.choices) == (b"[5,6]", [])
    assert _streamed({**chunk(), "choices": ODD}, odd=odd).choices == []


@pytest.mark.parametrize("odd", ('"a"', "7", "true", "null", "[]", "NaN"))
def test_choice_that_is_not_an_object(odd: str) -> None:
    completion = read_completion(encoded(whole(ODD, whole_choice(1)), odd))
    assert [(choice.index, choice.ids, choice.unreadable) for choice in completion.choices] == [
        (1, [7, 2], "")
    ]
    assert [choice.ids for choice in _streamed(chunk(ODD, end()), odd=odd).choices] == [[2]]


@pytest.mark.parametrize("odd", ("NaN", "1e999", f"{'1' * 5000}", '"\\ud800"', '{"\\udfff":"\\ud800"}'))
def test_unused_fields_that_msgspec_refuses_are_ignored(odd: str) -> None:
    message = {"role": "assistant", "content": "hi", "more": ODD}
    completion = read_completion(encoded(whole(whole_choice(message=message), more=ODD), odd))
    assert (completion.choices[0].ids, completion.choices[0].message["content"]) == ([7, 2], "hi")
    assert _problem(completion) is None
    _can_be_stored(completion)


def test_bytes_that_are_not_utf_8() -> None:
    body = encoded(whole(whole_choice(message={"content": "@"})), "")
    completion = read_completion(body.replace(b"@", b"\xff"))
    assert completion.choices[0].message == {"content": "\N{REPLACEMENT CHARACTER}"}
    assert _problem(completion) is None


_NO_OBJECTS = {
    "nothing": b"",
    "html": b"<html>",
    "a list": b"[]",
    "a list of objects": b"[{}]",
    "a string": b'"a"',
    "null": b"null",
    "NaN": b"NaN",
    "broken off": b'{"choices":[',
    "two objects": b"{}{}",
    "too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("body", _NO_OBJECTS.values(), ids=_NO_OBJECTS)
def test_completion_that_is_not_an_object(body: bytes) -> None:
    with pytest.raises(EngineBroken, match="the engine's response is not a chat completion"):
        read_completion(body)
    with pytest.raises(EngineBroken, match="the engine's response is not a chat completion"):
        StreamReader().read(body)


def test_malformed_completion_nested_too_deeply() -> None:
    body = encoded(whole(usage="3", more=ODD), "[" * 700 + "]" * 700)
    with pytest.raises(EngineBroken, match="the engine's response is not a chat completion"):
        read_completion(body)


def _can_be_stored(completion: Completion) -> None:
    """By whoever makes turns of it."""
    for choice in completion.choices:
        msgspec.json.encode(choice.message)
        msgspec.msgpack.encode((choice.finish_reason, choice.stop_reason, choice.weight_versions))
        pack_ids(choice.ids or ())
        pack_logprobs(choice.logprobs or ())
