"""What is read of completions: of sound ones everything, of odd ones what can be read."""

from typing import Any

import msgspec
import pytest

from proxy.errors import EngineBroken
from proxy.history.completion import Batch, Completion, SampledChoice, untrainable_reason
from proxy.history.turn import WeightSpan, pack_ids, pack_logprobs
from proxy.history.vocabulary import ABORTED, Problem
from proxy.turn.chunk import NO_REASON
from proxy.turn.reader import StreamReader, read_completion
from tests.unit.turn.bodies import ODD, Body, chunk, encoded, end, logprobs_of, piece, whole, whole_choice

_BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
_USAGE = {"completion_tokens": 2}


def _streamed(*chunks: Body, expected: int = 1, odd: str = "") -> Completion:
    reader = StreamReader(expected)
    for one in chunks:
        reader.read(encoded(one, odd))
    return reader.rest()


def _read(stream: bool, odd: str = "", top: Any = None, **fields: Any) -> Completion:
    """A completion of one choice, whole or as a stream of one chunk; `top` and `fields` replace its own."""
    if stream:
        body = {"prompt_token_ids": [5, 6], "usage": _USAGE, **(top or {})}
        last = end(**{"ids": [7, 2], "delta": {"content": "hi"}, **fields})
        completion = _streamed(chunk(last, **body), odd=odd)
    else:
        completion = read_completion(encoded(whole(whole_choice(**fields), **(top or {})), odd))
    _can_be_stored(completion)
    return completion


def _problem(completion: Completion) -> Problem | None:
    return untrainable_reason(completion, completion.choices[0], b"", media=False)


def _can_be_stored(completion: Completion) -> None:
    for choice in completion.choices:
        msgspec.json.encode(choice.message)
        msgspec.msgpack.encode((choice.finish_reason, choice.stop_reason, choice.weight_versions))
        pack_ids(choice.ids or ())
        pack_logprobs(choice.logprobs or ())


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
    for ids in ([5, 6], last):
        reader.read(encoded(chunk(piece(), prompt_token_ids=ids)))
    completion = reader.rest()
    assert (completion.prompt_ids, completion.packed_prompt) == (encoded(last), None)


def test_a_completion_without_evidence() -> None:
    body = whole(whole_choice(token_ids=None, logprobs={"content": None}), prompt_token_ids=None, usage=None)
    completion = read_completion(encoded(body))
    (choice,) = completion.choices
    assert (completion.prompt_ids, completion.completion_tokens) == (None, None)
    assert (choice.ids, choice.logprobs, choice.unreadable) == (None, None, "")


def test_a_stream() -> None:
    role = {"role": "assistant", "content": ""}
    completion = _streamed(
        chunk(piece(ids=None, delta=role), prompt_token_ids=[5, 6]),
        chunk(piece(text="h", ids=[7, 8]), usage={"completion_tokens": 2}),
        chunk(piece(text="i", ids=[9]), usage={"completion_tokens": 3}),
        chunk(end(stop_reason=2, ids=[2]), usage={"completion_tokens": 4}),
        chunk(usage={"completion_tokens": 4}),
    )
    message = {"role": "assistant", "content": "hi"}
    expected = SampledChoice(0, message, [7, 8, 9, 2], [-0.5] * 4, "stop", stop_reason=2, counted=4)
    assert completion == Completion(b"[5,6]", [expected])
    assert _problem(completion) is None


def test_a_choice_is_returned_once_when_it_ends() -> None:
    reader = StreamReader(expected=2)
    reader.read(encoded(chunk(piece(0), piece(1))))
    assert reader.ended().choices == []
    reader.read(encoded(chunk(end(1))))
    (choice,) = reader.ended().choices
    reader.read(encoded(chunk(end(1, ids=[9], finish_reason="length"))))
    assert reader.ended().choices == []
    assert (choice.index, choice.ids, choice.finish_reason) == (1, [7, 2], "stop")
    assert not reader.complete
    reader.read(encoded(chunk(end(0))))
    assert reader.complete
    assert [choice.index for choice in reader.ended().choices] == [0]
    assert reader.rest().choices == []


def test_a_stream_that_breaks_off() -> None:
    reader = StreamReader(expected=2)
    reader.read(encoded(chunk(piece(0), end(1))))
    assert [choice.finish_reason for choice in reader.rest().choices] == [ABORTED, "stop"]
    assert reader.rest().choices == []
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


@pytest.mark.parametrize(
    "delta, ids",
    [
        ({"role": "assistant", "content": ""}, [7, 2]),
        (None, [7, 2]),
        ({"content": "h"}, None),
        ({"reasoning": "h"}, None),
        ("text", None),
        (7, None),
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
        {"tool_calls": [{**call(0, name="f"), "id": "one", "type": "function"}]},
        {"tool_calls": [call(0, arguments='{"x')]},
        {"tool_calls": [call(0, arguments='":1}'), {"index": 1, "id": ""}]},
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
    completion = _streamed(
        chunk(piece()),
        {"error": "gone", "choices": [end(ids=[9])], "prompt_token_ids": [1]},
    )
    assert (completion.prompt_ids, completion.choices[0].ids) == (None, [7])


# --- the echoed prompt

_ELSEWHERE: dict[str, Body] = {
    "in a choice": whole(whole_choice(prompt_token_ids=[9]), prompt_token_ids=None),
    "in a choice and at its place": whole(whole_choice(prompt_token_ids=[9])),
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


# --- odd evidence

_ODD_IDS = (
    '["7"]', '["]","["]', "[7.5]", "[null]", "[-2]", "[2147483648]", f"[{'1' * 5000}]", "[1e999]", "[[7]]",
    "[NaN]", '"7"', "7", "false", '{"0":7}', '"\\ud800"',
)  # fmt: skip
_ODD_EVIDENCE: dict[str, tuple[str, ...]] = {
    "token_ids": _ODD_IDS,
    "prompt_token_ids": (*_ODD_IDS, "[5,,6]", "[05,6]"),
    "logprobs": (
        '"-0.5"',
        "[-0.5]",
        '{"content":{"logprob":-0.5}}',
        '{"content":[null]}',
        '{"content":[{"logprob":null}]}',
        '{"content":[{"logprob":true}]}',
        '{"content":[{"token":"t"}]}',
        f'{{"content":[{{"logprob":-1{"0" * 400}}}]}}',
    ),
    "index": ('"0"', "-1", "0.5", "65536", "1" * 5000, "NaN", "true"),
}


@_BOTH
@pytest.mark.parametrize("name, odd", [(name, odd) for name in _ODD_EVIDENCE for odd in _ODD_EVIDENCE[name]])
def test_odd_evidence_is_named_and_the_rest_is_read(name: str, odd: str, stream: bool) -> None:
    if name == "prompt_token_ids":
        completion = _read(stream, odd, {name: ODD})
    else:
        completion = _read(stream, odd, **{name: ODD})
    (choice,) = completion.choices
    assert choice.unreadable == name
    assert completion.prompt_ids == (None if name == "prompt_token_ids" else b"[5,6]")
    assert choice.ids == (None if name == "token_ids" else [7, 2])
    assert (choice.logprobs is None) == (name == "logprobs")
    assert (choice.index, choice.message["content"], choice.finish_reason) == (0, "hi", "stop")
    assert _problem(completion) is Problem.UNREADABLE_EVIDENCE


@pytest.mark.parametrize("name, odd", [("token_ids", "[-1]"), ("logprobs", "[]")])
def test_one_odd_piece_makes_the_evidence_of_its_choice_worthless(name: str, odd: str) -> None:
    completion = _streamed(chunk(piece()), chunk(piece(**{name: ODD})), chunk(end()), odd=odd)
    (choice,) = completion.choices
    assert (choice.unreadable, getattr(choice, name.removeprefix("token_"))) == (name, None)


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


@pytest.mark.parametrize("missing", [{}, {"index": None}])
def test_the_index_of_an_only_choice_may_be_missing(missing: Body) -> None:
    without, last = ({k: v for k, v in one.items() if k != "index"} for one in (whole_choice(), end()))
    for completion in (read_completion(encoded(whole(without | missing))), _streamed(chunk(last | missing))):
        assert [(choice.index, choice.unreadable) for choice in completion.choices] == [(0, "")]


@pytest.mark.parametrize(
    "given, read",
    [
        ([None, 0, None], [(1, "index"), (0, ""), (2, "index")]),
        ([1, 1, 0], [(1, ""), (2, "index"), (0, "")]),
        ([ODD, 0], [(1, "index"), (0, "")]),
    ],
)
def test_choices_of_a_whole_completion_get_unique_indices(given: list[Any], read: Any) -> None:
    completion = read_completion(encoded(whole(*map(whole_choice, given)), '"0"'))
    assert [(choice.index, choice.unreadable) for choice in completion.choices] == read


def test_indices_of_a_stream_that_are_not_sure() -> None:
    completion = _streamed(chunk(end(None)), chunk(end(1)), expected=2)
    assert [(choice.index, choice.unreadable) for choice in completion.choices] == [(0, "index"), (1, "")]
    completion = _streamed(chunk(piece(1), piece(1)), chunk(end(1)), chunk(end(0)), expected=2)
    assert [(choice.index, choice.unreadable) for choice in completion.choices] == [(1, "index"), (0, "")]
    (choice,) = _streamed(chunk(end(0), end(None))).choices
    assert choice.unreadable == "index"


# --- odd fields that are no evidence

_OPTIONAL: dict[str, tuple[str, ...]] = {
    "stop_reason": ("[]", "true", "1.5", "NaN", "1" * 30),
    "routed_experts": ("{}", "[[1]]", "7"),
    "weight_versions": (
        '"v"',
        "[1]",
        '[{"version":"v"}]',
        '[{"version":"v","start":-1,"end":1}]',
        '[{"version":true,"start":0,"end":1}]',
        f'[{{"version":{"1" * 5000},"start":0,"end":1}}]',
    ),
    "unknown": ("NaN", "1e999", "1" * 5000, '"\\ud800"', '{"\\udfff":"\\ud800"}'),
}


@_BOTH
@pytest.mark.parametrize("name, odd", [(name, odd) for name, values in _OPTIONAL.items() for odd in values])
def test_an_odd_optional_field_is_left_out(stream: bool, name: str, odd: str) -> None:
    completion = _read(stream, odd, **{name: ODD})
    assert completion == _read(stream)
    assert _problem(completion) is None


@pytest.mark.parametrize("odd", ['"hi"', "[]", "7"])
def test_an_odd_message_is_left_out(odd: str) -> None:
    assert _read(False, odd, message=ODD) == _read(False, message={})
    (choice,) = _read(True, odd, delta=ODD).choices
    assert (choice.ids, choice.message["content"], choice.unreadable) == ([7, 2], None, "")


@_BOTH
@pytest.mark.parametrize("odd", ['"2"', "[]", '{"completion_tokens":"2"}', '{"completion_tokens":-2}'])
def test_malformed_usage_is_ignored(stream: bool, odd: str) -> None:
    completion = _read(stream, odd, {"usage": ODD})
    (choice,) = completion.choices
    assert (choice.counted if stream else completion.completion_tokens) is None
    assert (choice.ids, choice.unreadable) == ([7, 2], "")


@pytest.mark.parametrize(
    "odd, reason", [("7", NO_REASON), ('["stop"]', NO_REASON), ("0", None), ("[]", None), ('""', None)]
)
def test_an_odd_finish_reason_ends_a_choice_unless_it_is_empty(odd: str, reason: str | None) -> None:
    (choice,) = _read(False, odd, finish_reason=ODD).choices
    assert (choice.finish_reason, choice.ids) == (reason, [7, 2])
    reader = StreamReader()
    reader.read(encoded(chunk(end(finish_reason=ODD)), odd))
    assert [choice.finish_reason for choice in reader.ended().choices] == ([reason] if reason else [])


_ODD_CALLS: dict[str, str] = {
    "an object": '{"index":0}',
    "strings": '["f",null,7,[]]',
    "index of null": '[{"index":null,"id":"a"}]',
    "indices of different kinds": '[{"index":"0"},{"index":1},{"index":[]},{"index":true}]',
    "an odd identity": '[{"index":0,"id":7,"type":{}}]',
    "an odd function": '[{"index":0,"function":"f"},{"index":1,"function":[1]}]',
    "an odd name": '[{"index":0,"function":{"name":7,"arguments":{"x":1}}}]',
}


@_BOTH
@pytest.mark.parametrize("odd", _ODD_CALLS.values(), ids=_ODD_CALLS)
def test_odd_tool_calls(odd: str, stream: bool) -> None:
    calls = {"role": "assistant", "content": "hi", "tool_calls": ODD}
    (choice,) = _read(stream, odd, **{"delta" if stream else "message": calls}).choices
    assert (choice.ids, choice.unreadable, choice.message["content"]) == ([7, 2], "", "hi")
    for call in choice.message.get("tool_calls", []) if stream else []:
        assert (call["type"], type(call["function"])) == ("function", dict)


@pytest.mark.parametrize("odd", ['"a"', "null", '{"0":{"token_ids":[7]}}', "NaN"])
def test_choices_that_are_not_a_list_or_hold_no_object(odd: str) -> None:
    completion = read_completion(encoded(whole(choices=ODD), odd))
    assert (completion.prompt_ids, completion.choices) == (b"[5,6]", [])
    assert _streamed({**chunk(), "choices": ODD}, odd=odd).choices == []
    odd = "[]" if odd.startswith("{") else odd
    (choice,) = read_completion(encoded(whole(ODD, whole_choice(1)), odd)).choices
    assert (choice.index, choice.ids, choice.unreadable) == (1, [7, 2], "")
    assert [choice.ids for choice in _streamed(chunk(ODD, end()), odd=odd).choices] == [[2]]


def test_bytes_that_are_not_utf_8() -> None:
    body = encoded(whole(whole_choice(message={"content": "@"})), "")
    completion = read_completion(body.replace(b"@", b"\xff"))
    assert completion.choices[0].message == {"content": "\N{REPLACEMENT CHARACTER}"}
    assert _problem(completion) is None


_NESTED = encoded(whole(usage="3", more=ODD), "[" * 700 + "]" * 700)


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[{}]", b'"a"', b"NaN", b'{"choices":[', b"{}{}", b"[" * 100_000, _NESTED],
    ids=range(9),
)  # fmt: skip
def test_completion_that_is_not_an_object(body: bytes) -> None:
    for read in (read_completion, StreamReader().read):
        with pytest.raises(EngineBroken, match="the engine's response is not a chat completion"):
            read(body)


# --- completions with several prompts, and responses of generate

_BATCH = Batch((b"[5,6]", b""), 2)


def _text_choice(index: int, **fields: Any) -> Body:
    """A choice of the completions route, whole or a piece."""
    logprobs = {"tokens": ["h", "i"], "token_logprobs": [-0.5, -0.25], "top_logprobs": [], "text_offset": []}
    return {
        "index": index,
        "text": "hi",
        "logprobs": logprobs,
        "finish_reason": "stop",
        "token_ids": [7, 2],
        "prompt_token_ids": [5, 6] if index < 2 else [8],
        **fields,
    }


def _texts(*choices: Body, counted: int = 8) -> bytes:
    return encoded({"id": "c", "choices": list(choices), "usage": {"completion_tokens": counted}})


@pytest.mark.parametrize("counted, of_part", [(8, 4), (9, 5)], ids=["right", "wrong"])
def test_each_choice_has_its_prompt(counted: int, of_part: int) -> None:
    """A wrong number of ids shows in each part."""
    completion = read_completion(_texts(*map(_text_choice, range(4)), counted=counted), batch=_BATCH)
    assert [choice.prompt_ids for choice in completion.choices] == [b"[5,6]"] * 2 + [b"[8]"] * 2
    assert completion.prompt_ids is None
    message = {"role": "assistant", "content": "hi"}
    last = SampledChoice(3, message, [7, 2], [-0.5, -0.25], "stop", prompt_ids=b"[8]")
    assert completion.choices[3] == last
    parts = completion.by_prompt(_BATCH)
    assert {position: part.prompt_ids for position, part in parts.items()} == {0: b"[5,6]", 1: b"[8]"}
    assert [[choice.index for choice in parts[at].choices] for at in (0, 1)] == [[0, 1], [2, 3]]
    assert [parts[at].completion_tokens for at in (0, 1)] == [of_part, of_part]


def test_the_first_echo_of_a_prompt_is_that_of_its_choices() -> None:
    """vLLM's streams echo a prompt once, with the choice that comes first."""
    reader = StreamReader(4, batch=_BATCH)
    for index in (1, 0, 3, 2):
        echo = {1: [5, 6], 3: [8]}.get(index)
        reader.read(_texts(_text_choice(index, prompt_token_ids=echo)))
    assert reader.complete
    echoes = {choice.index: choice.prompt_ids for choice in reader.ended().choices}
    assert echoes == {0: b"[5,6]", 1: b"[5,6]", 2: b"[8]", 3: b"[8]"}


def test_a_stream_of_texts_is_joined() -> None:
    reader = StreamReader(2, batch=Batch((b"[5,6]",), 2))
    for text, ids, reason in (("h", [7], None), ("i", [], None), ("", [2], "length")):
        logprobs = {"token_logprobs": [-0.5] * len(ids)}
        part = _text_choice(1, text=text, token_ids=ids, finish_reason=reason, logprobs=logprobs)
        reader.read(_texts(part))
    [choice] = reader.ended().choices
    assert (choice.ids, choice.logprobs, choice.finish_reason) == ([7, 2], [-0.5, -0.5], "length")
    assert choice.message == {"role": "assistant", "content": "hi"}


@_BOTH
@pytest.mark.parametrize(
    "name, odd",
    [
        ("token_ids", ["7"]),
        ("logprobs", {"token_logprobs": [None, -0.5]}),
        ("prompt_token_ids", ["5"]),
    ],
)
def test_odd_evidence_of_one_choice_is_named(name: str, odd: object, stream: bool) -> None:
    body = _texts(_text_choice(0, **{name: odd}), _text_choice(2))
    if stream:
        reader = StreamReader(4, batch=_BATCH)
        reader.read(body)
        completion = reader.rest()
    else:
        completion = read_completion(body, batch=_BATCH)
    assert [choice.unreadable for choice in completion.choices] == [name, ""]
    assert completion.choices[1].ids == [7, 2]


def test_whole_text_without_ids_makes_the_ids_unknown() -> None:
    completion = read_completion(_texts(_text_choice(0, token_ids=None)), batch=_BATCH)
    assert completion.choices[0].ids is None


@_BOTH
def test_a_response_of_generate(stream: bool) -> None:
    logprobs = {"content": [{"token_id": token, "logprob": -0.5, "rank": 1} for token in (7, 2)]}
    parts: list[Body] = [{"token_ids": [7], "sampling_mask": [[7, 8]], "logprobs": None}]
    parts += [{"token_ids": [2], "sampling_mask": [[2]], "logprobs": logprobs, "finish_reason": "stop"}]
    if stream:
        reader = StreamReader()
        for part in parts:
            reader.read(encoded({"choices": [{"index": 0, **part}], "prompt_token_ids": [5, 6]}))
        completion = reader.ended()
    else:
        whole_part = {**parts[1], "token_ids": [7, 2], "sampling_mask": [[7, 8], [2]]}
        completion = read_completion(encoded({"choices": [whole_part], "prompt_token_ids": [5, 6]}))
    [sampled] = completion.choices
    assert completion.prompt_ids == b"[5,6]"
    assert (sampled.ids, sampled.logprobs) == ([7, 2], [-0.5, -0.5])
    assert sampled.sampling_mask == [[7, 8], [2]]
    assert sampled.message == {"role": "assistant", "content": None}
