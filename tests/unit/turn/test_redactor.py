"""What a client gets to see of completions."""

import itertools
import json
from typing import Any

import pytest

from proxy.errors import EngineBroken
from proxy.turn.redactor import StreamRedactor, redact_completion
from proxy.turn.request import EngineRoute
from proxy.turn.visible import Visible
from tests.unit.turn.bodies import (
    EVERYTHING,
    NOTHING,
    ODD,
    Body,
    chunk,
    encoded,
    end,
    logprobs_of,
    piece,
    redact_chunk,
    whole,
    whole_choice,
)

_IDS = Visible(ids=True, logprobs=False)
_LOGPROBS = Visible(ids=False, logprobs=True)
_NO_REASONING = Visible(ids=False, logprobs=False, reasoning=False)
_HIDDEN = {"token_ids": None, "logprobs": None}


def _redacted(body: Body, visible: Visible, odd: str = "null") -> Any:
    return json.loads(redact_completion(encoded(body, odd), visible))


def _streamed(visible: Visible, *chunks: Body, odd: str = "null") -> list[Any]:
    """What the client gets of a stream."""
    redactor = StreamRedactor(visible)
    kept = [redact_chunk(redactor, encoded(one, odd)) for one in chunks]
    return [json.loads(data) for data in kept if data is not None]


# --- whole completions


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("ids, logprobs", list(itertools.product((False, True), repeat=2)))
def test_fields_that_were_not_requested_are_null(ids: bool, logprobs: bool, spaced: bool) -> None:
    body = encoded(whole(whole_choice(0), whole_choice(1)), spaced=spaced)
    hidden: Body = ({} if ids else {"token_ids": None}) | ({} if logprobs else {"logprobs": None})
    expected = whole(whole_choice(0, **hidden), whole_choice(1, **hidden))
    expected |= {} if ids else {"prompt_token_ids": None}
    assert json.loads(redact_completion(body, Visible(ids, logprobs))) == expected


def test_fields_that_are_missing_stay_missing() -> None:
    assert _redacted({"choices": [{"index": 0}]}, NOTHING) == {"choices": [{"index": 0}]}
    assert _redacted({"id": "c"}, NOTHING) == {"id": "c"}


def test_a_client_that_asked_for_everything_gets_the_engines_bytes() -> None:
    body = encoded(whole(), spaced=True)
    assert redact_completion(body, Visible(ids=True, logprobs=True)) is body
    for data in (encoded(chunk(piece()), spaced=True), b"not even JSON"):
        assert StreamRedactor(EVERYTHING).redact(data, None) is data


def test_other_fields_keep_the_engines_spelling() -> None:
    odd = '{"a": 1.0, "b":1e5 ,"c":12345678901234567890123, "d":"\\u00e9\\/"}'
    message = {"role": "assistant", "content": "hi", "more": ODD}
    kept = redact_completion(encoded(whole(whole_choice(message=message, more=ODD), more=ODD), odd), NOTHING)
    assert kept.count(odd.encode()) == 3


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_hidden_in_a_message(name: str) -> None:
    message = {"role": "assistant", "content": None, name: "so"}
    (choice,) = _redacted(whole(whole_choice(message=message)), _NO_REASONING)["choices"]
    assert choice["message"] == {"role": "assistant", "content": None, name: None}
    (choice,) = _redacted(whole(whole_choice(message=message)), NOTHING)["choices"]
    assert choice["message"] == message


def test_an_array_of_the_same_name_elsewhere_is_kept() -> None:
    inside = whole_choice(prompt_token_ids=[9])
    for prompt in (None, [5, 6]):
        kept = _redacted(whole(inside, prompt_token_ids=prompt), NOTHING)
        assert kept == whole({**inside, **_HIDDEN}, prompt_token_ids=None)
        kept = _redacted(whole(inside, prompt_token_ids=prompt), _IDS)
        assert kept == whole({**inside, "logprobs": None}, prompt_token_ids=prompt)


def test_prompts_of_the_other_routes_are_hidden_where_they_stand() -> None:
    body = encoded(whole(whole_choice(prompt_token_ids=[9]), mm_placeholders={"image": []}))
    of_choices = json.loads(redact_completion(body, _LOGPROBS, EngineRoute.COMPLETIONS))["choices"]
    assert [(choice["token_ids"], choice["prompt_token_ids"]) for choice in of_choices] == [(None, None)]
    generated = json.loads(redact_completion(body, _LOGPROBS, EngineRoute.GENERATE))
    assert (generated["prompt_token_ids"], generated["mm_placeholders"]) == (None, None)
    assert generated["choices"][0]["token_ids"] == [7, 2]  # generate always returns them


# --- streams

_ROLE = chunk(piece(ids=None, delta={"role": "assistant", "content": ""}), prompt_token_ids=[5, 6])
_TEXT = chunk(piece(), usage={"completion_tokens": 1})
_SILENT = chunk(piece(text=None), usage={"completion_tokens": 2})
_END = chunk(end(), usage={"completion_tokens": 3})
_USAGE = chunk(usage={"completion_tokens": 3})
_STREAM = (_ROLE, _TEXT, _SILENT, _END, _USAGE)


def _hidden(body: Body, *names: str) -> Body:
    """A chunk without usage, and with null for some fields of its choices."""
    kept = {name: value for name, value in body.items() if name != "usage"}
    if "token_ids" in names and "prompt_token_ids" in kept:
        kept["prompt_token_ids"] = None
    return {**kept, "choices": [{**choice, **dict.fromkeys(names)} for choice in body["choices"]]}


def test_client_that_requested_no_evidence() -> None:
    """A chunk that was sent for its ids alone is not sent, nor the one with usage."""
    expected = [_hidden(one, *_HIDDEN) for one in (_ROLE, _TEXT, _END)]
    assert _streamed(NOTHING, *_STREAM) == expected
    usage = Visible(ids=False, logprobs=False, usage=True)
    assert _streamed(usage, *_STREAM) == [*expected, _USAGE]
    running = Visible(ids=False, logprobs=False, usage=True, running_usage=True)
    for sent, kept in zip((_TEXT, _END), expected[1:], strict=True):
        kept["usage"] = sent["usage"]
    assert _streamed(running, *_STREAM) == [*expected, _USAGE]


def test_client_that_requested_ids_or_logprobs_gets_empty_chunks() -> None:
    shown = (_ROLE, _TEXT, _SILENT, _END)
    assert _streamed(_IDS, *_STREAM) == [_hidden(one, "logprobs") for one in shown]
    assert _streamed(_LOGPROBS, *_STREAM) == [_hidden(one, "token_ids") for one in shown]
    both = Visible(ids=True, logprobs=True)
    assert _streamed(both, *_STREAM) == [_hidden(one) for one in shown]


@pytest.mark.parametrize("delta", [{}, None, ODD, "missing"])
def test_a_chunk_with_an_empty_delta_is_not_sent(delta: object) -> None:
    empty = piece(delta=delta)
    if delta == "missing":
        del empty["delta"]
    for visible in (NOTHING, _NO_REASONING):
        assert _streamed(visible, chunk(empty), odd="{ }") == []
        (kept,) = _streamed(visible, chunk(empty, piece(1, "h")), odd="{ }")
        assert [choice["token_ids"] for choice in kept["choices"]] == [None, None]


def test_reasoning_is_hidden_in_deltas() -> None:
    chunks = [
        chunk(piece(delta={"reasoning": "so"})),
        chunk(piece(delta={"reasoning_content": "so"})),
        chunk(piece(delta={"reasoning": "so", "content": "h"})),
        chunk(piece(delta={"reasoning": None, "content": "i"})),
        chunk(end(delta={"reasoning": "so"})),
    ]
    kept = [one["choices"][0]["delta"] for one in _streamed(_NO_REASONING, *chunks)]
    assert kept == [{"content": "h"}, {"content": "i"}, {}]


@pytest.mark.parametrize("visible", [NOTHING, _IDS, _NO_REASONING, Visible(False, False, True, True)])
def test_error_of_the_engine_is_passed_on_and_evidence_next_to_it_hidden(visible: Visible) -> None:
    error = {"error": {"message": "out of memory", "code": 500}}
    assert _streamed(visible, error) == [error]
    (kept,) = _streamed(NOTHING, {**error, "choices": [piece(text=None)], "prompt_token_ids": [5]})
    assert kept == {**error, "choices": [piece(text=None, **_HIDDEN)], "prompt_token_ids": None}


# --- odd shapes


@pytest.mark.parametrize("odd", ['"a"', '{"0":{"index":0}}', "NaN"])
def test_choices_that_are_not_a_list(odd: str) -> None:
    kept = redact_completion(encoded(whole(choices=ODD), odd), NOTHING)
    assert kept == encoded(whole(choices=ODD, prompt_token_ids=None), odd)
    data = redact_chunk(StreamRedactor(NOTHING), encoded({**_ROLE, "choices": ODD}, odd))
    assert data == encoded({**_ROLE, "choices": ODD, "prompt_token_ids": None}, odd)


@pytest.mark.parametrize("odd", ['"a"', "null", "[]", "NaN"])
def test_other_choices_are_redacted_if_one_is_not_an_object(odd: str) -> None:
    kept = redact_completion(encoded(whole(ODD, whole_choice()), odd), NOTHING)
    assert kept == encoded(whole(ODD, whole_choice(**_HIDDEN), prompt_token_ids=None), odd)
    data = redact_chunk(StreamRedactor(NOTHING), encoded(chunk(ODD, piece(text=None)), odd))
    assert data == encoded(chunk(ODD, piece(text=None, **_HIDDEN)), odd)


@pytest.mark.parametrize("odd", ['"a"', '["reasoning"]', "NaN"])
@pytest.mark.parametrize("visible", [NOTHING, _NO_REASONING])
def test_message_that_is_not_an_object(visible: Visible, odd: str) -> None:
    kept = redact_completion(encoded(whole(whole_choice(message=ODD)), odd), visible)
    assert kept == encoded(whole(whole_choice(message=ODD, **_HIDDEN), prompt_token_ids=None), odd)
    data = redact_chunk(StreamRedactor(visible), encoded(chunk(piece(delta=ODD)), odd))
    assert data == encoded(chunk(piece(delta=ODD, **_HIDDEN)), odd)


@pytest.mark.parametrize("odd", ["NaN", "-Infinity", '"\\ud800"'])
def test_json_that_msgspec_refuses_is_redacted(odd: str) -> None:
    evidence: Body = {"logprobs": logprobs_of(ODD)}
    (choice,) = _redacted(whole(whole_choice(**evidence)), NOTHING, odd)["choices"]
    assert choice == whole_choice(**_HIDDEN)
    kept = redact_completion(encoded(whole(whole_choice(**evidence), more=ODD), odd), _LOGPROBS)
    expected = whole(whole_choice(token_ids=None, **evidence), more=ODD, prompt_token_ids=None)
    assert kept == encoded(expected, odd)
    final = end(ids=None, delta={"content": ODD, "reasoning": ODD})
    data = redact_chunk(StreamRedactor(_NO_REASONING), encoded(chunk(final), odd))
    assert data == encoded(chunk(end(ids=None, delta={"content": ODD}, logprobs=None)), odd)


def test_a_name_that_has_no_utf_8() -> None:
    data = b'{"\\ud800":1,"choices":[{"\\ud800":2,"token_ids":[7],"delta":{"content":"h"}}]}'
    assert redact_chunk(StreamRedactor(NOTHING), data) == (
        b'{"?":1,"choices":[{"?":2,"token_ids":null,"delta":{"content":"h"}}]}'
    )


@pytest.mark.parametrize("data", [b"", b"<html>", b"[]", b"null", b"[" * 9999], ids=range(5))
def test_data_that_is_not_an_object_is_not_passed_on(data: bytes) -> None:
    with pytest.raises(EngineBroken):
        redact_completion(data, NOTHING)
    with pytest.raises(EngineBroken):
        redact_chunk(StreamRedactor(NOTHING), data)
