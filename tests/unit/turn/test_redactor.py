"""What a client gets to see of completions."""

import itertools
import json
from typing import Any

import pytest

from tests.unit.turn.bodies import (
    NOTHING,
    ODD,
    Body,
    chunk,
    encoded,
    end,
    piece,
    redact_chunk,
    redact_completion,
    whole,
    whole_choice,
)
from tokenproxy.base.request import Visible
from tokenproxy.engine.sse import data_event, event_data
from tokenproxy.turn.answer import Redactor
from tokenproxy.turn.parsing import parse

_LOGPROBS = Visible(ids=False, logprobs=True)
_NO_REASONING = Visible(ids=False, logprobs=False, reasoning=False)
_HIDDEN = {"token_ids": None, "logprobs": None}


def _redacted(body: Body, visible: Visible) -> Any:
    return json.loads(redact_completion(encoded(body), visible))


def _streamed(visible: Visible, *chunks: Body, odd: str = "null") -> list[Any]:
    """What the client gets of a stream."""
    redactor = Redactor(visible)
    kept = [redact_chunk(redactor, encoded(one, odd)) for one in chunks]
    return [json.loads(data) for data in kept if data is not None]


@pytest.mark.parametrize("ids, logprobs", list(itertools.product((False, True), repeat=2)))
def test_fields_that_were_not_requested_are_null(ids: bool, logprobs: bool) -> None:
    """Fields inside a choice that have the same name as one of the completion are kept."""
    hidden: Body = ({} if ids else {"token_ids": None}) | ({} if logprobs else {"logprobs": None})
    inside = {"prompt_token_ids": [9]}
    for prompt, spaced in itertools.product((None, [5, 6]), (False, True)):
        body = whole(whole_choice(0), whole_choice(1, **inside), prompt_token_ids=prompt)
        expected = whole(whole_choice(0, **hidden), whole_choice(1, **inside, **hidden))
        expected["prompt_token_ids"] = prompt if ids else None
        redacted = redact_completion(encoded(body, spaced=spaced), Visible(ids, logprobs))
        assert json.loads(redacted) == expected
    assert _redacted({"choices": [{"index": 0}]}, NOTHING) == {"choices": [{"index": 0}]}
    assert _redacted({"id": "c"}, NOTHING) == {"id": "c"}


def test_a_client_that_asked_for_everything_gets_the_engines_bytes() -> None:
    body = encoded(whole(), spaced=True)
    assert redact_completion(body, Visible(ids=True, logprobs=True)) is body
    everything = Redactor(Visible(ids=True, logprobs=True, usage=True, running_usage=True))
    for event in (data_event(encoded(chunk(piece()), spaced=True)), b": ping\ndata:  {}\n\n"):
        assert everything.event(event, parse(event_data(event) or b"")) is event


def test_other_fields_keep_the_engines_spelling() -> None:
    odd = '{"a": 1.0, "b":1e5 ,"c":12345678901234567890123, "d":"\\u00e9\\/"}'
    message = {"role": "assistant", "content": "hi", "more": ODD}
    kept = redact_completion(encoded(whole(whole_choice(message=message, more=ODD), more=ODD), odd), NOTHING)
    assert kept.count(odd.encode()) == 3


_ROLE = chunk(piece(ids=None, delta={"role": "assistant", "content": ""}), prompt_token_ids=[5, 6])
_TEXT = chunk(piece(), usage={"completion_tokens": 1})
_SILENT = chunk(piece(text=None), usage={"completion_tokens": 2})
_END = chunk(end(), usage={"completion_tokens": 3})
_USAGE = chunk(usage={"completion_tokens": 3})


@pytest.mark.parametrize("ids, logprobs", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("usage, running", [(False, False), (True, False), (True, True)])
def test_chunks_of_a_stream(ids: bool, logprobs: bool, usage: bool, running: bool) -> None:
    """A chunk that was sent for its ids alone is sent only to whom wants evidence."""
    sent = [_ROLE, _TEXT, *([_SILENT] if ids or logprobs else []), _END, *([_USAGE] if usage else [])]
    hidden: Body = ({} if ids else {"token_ids": None}) | ({} if logprobs else {"logprobs": None})
    expected = []
    for body in sent:
        shown = {**body, "choices": [{**choice, **hidden} for choice in body["choices"]]}
        if "prompt_token_ids" in shown and not ids:
            shown["prompt_token_ids"] = None
        if body is not _USAGE and not running:
            shown.pop("usage", None)
        expected.append(shown)
    visible = Visible(ids, logprobs, usage, running)
    assert _streamed(visible, _ROLE, _TEXT, _SILENT, _END, _USAGE) == expected


@pytest.mark.parametrize("delta", [{}, None, ODD, "missing"])
def test_a_chunk_with_an_empty_delta_is_not_sent(delta: object) -> None:
    empty = piece(delta=delta)
    if delta == "missing":
        del empty["delta"]
    assert _streamed(NOTHING, chunk(empty), odd="{ }") == []
    (kept,) = _streamed(NOTHING, chunk(empty, piece(1, "h")), odd="{ }")
    assert [choice["token_ids"] for choice in kept["choices"]] == [None, None]


def test_reasoning_is_hidden() -> None:
    message = {"role": "assistant", "content": None, "reasoning": "so"}
    (choice,) = _redacted(whole(whole_choice(message=message)), _NO_REASONING)["choices"]
    assert choice["message"] == {**message, "reasoning": None}
    deltas: list[Body] = [{"reasoning": "so"}, {"reasoning": "so", "content": "h"}]
    chunks = [*(chunk(piece(delta=delta)) for delta in deltas), chunk(end(delta={"reasoning": "so"}))]
    kept = [one["choices"][0]["delta"] for one in _streamed(_NO_REASONING, *chunks)]
    assert kept == [{"content": "h"}, {}]


def test_error_of_the_engine_is_passed_on_and_evidence_next_to_it_hidden() -> None:
    error = {"error": {"message": "out of memory", "code": 500}}
    (kept,) = _streamed(NOTHING, {**error, "choices": [piece(text=None)], "prompt_token_ids": [5]})
    assert kept == {**error, "choices": [piece(text=None, **_HIDDEN)], "prompt_token_ids": None}
