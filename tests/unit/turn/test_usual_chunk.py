"""The chunks of vLLM fit the structs, which read and redact them as if they were read field by field."""

import itertools
import json
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.turn.bodies import Body, CompletionReader, encoded, redact_chunk
from tokenproxy.base.errors import EngineBroken
from tokenproxy.base.request import Visible
from tokenproxy.engine.sse import data_event, event_data
from tokenproxy.turn import parsing, reader, wire
from tokenproxy.turn.answer import Redactor
from tokenproxy.turn.lenient import parse_leniently
from tokenproxy.turn.usual import UsualChunk

_VISIBLE = [
    Visible(ids, logprobs, usage, running, reasoning)
    for ids, logprobs, usage, running, reasoning in itertools.product((False, True), repeat=5)
    if reasoning or not (ids or logprobs)
]
_CANDIDATE = {"token": "a", "logprob": -1e-05, "bytes": []}
_USAGE = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}


def _logprob(token: str = "Hi", value: float = -0.5, **fields: Any) -> Body:
    utf8 = list(token.encode("utf-8", "replace"))
    return {"token": token, "logprob": value, "bytes": utf8, "top_logprobs": [], **fields}


def _choice(**fields: Any) -> Body:
    """A piece of a choice as vLLM writes it."""
    return {
        "index": 0,
        "delta": {"content": "Hi"},
        "logprobs": {"content": [_logprob()]},
        "finish_reason": None,
        "token_ids": [74],
        **fields,
    }


def _chunk(*choices: Body, **fields: Any) -> Body:
    """A chunk as vLLM writes it."""
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1763683200, "model": "m"}
    return {**head, "choices": list(choices), "usage": _USAGE, **fields}


def _outcome(visible: Visible, data: bytes, chunk: wire.Completion | None = None) -> Any:
    """What a client gets of a chunk, as JSON; `chunk` if that was parsed already."""
    redactor, event = Redactor(visible), data_event(data)
    shown = redact_chunk(redactor, data) if chunk is None else redactor.event(event, chunk)
    if shown is None:
        return None
    return parse_leniently(shown if chunk is None else event_data(shown) or b"")


def _field_by_field(data: bytes) -> Any:
    with patch.object(parsing, "_decode", side_effect=msgspec.DecodeError("")):
        return parsing.parse(data)


def _check(data: bytes) -> None:
    """The law: a chunk is read and redacted as if it were read field by field."""
    usual, odd = CompletionReader(), CompletionReader()
    try:
        usual.read(data)
    except EngineBroken:
        with pytest.raises(EngineBroken):
            _field_by_field(data)
        return
    reader.CompletionReader.read(odd, _field_by_field(data))
    assert usual.rest() == odd.rest()
    added, read = CompletionReader(), CompletionReader()
    role = b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}'
    added.read(role)
    chunk = UsualChunk.match(data_event(data))
    if chunk is not None and added.add(chunk):
        read.read(role)
        read.read(data)
        assert added.rest() == read.rest()
    for visible in _VISIBLE:
        expected = _outcome(visible, data, _field_by_field(data))
        assert _outcome(visible, data) == _outcome(visible, data, parsing.parse(data)) == expected


@pytest.mark.parametrize("of_0_33", [{}, {"kv_transfer_params": None}], ids=["up to 0.32", "0.33"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"index": 3, "delta": {"content": ""}},
        {"delta": {"reasoning": "so"}},
        {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": "b\\n'}}]}},
        {"logprobs": None},
        {"token_ids": [1, 22, 333], "logprobs": {"content": [_logprob()] * 3}},
        {"logprobs": {"content": [_logprob(value=-9999.0, bytes=None)]}},
        {"logprobs": {"content": [_logprob(top_logprobs=[_CANDIDATE, _CANDIDATE])]}},
        {"delta": {"content": 'é\U0001f600"\\/\n\t\x01,"token_ids":[1],"logprobs":{}}],"usage":{}'}},
    ],
)
def test_the_chunks_of_vllm_fit_the_structs(fields: Body, of_0_33: Body) -> None:
    order = ("index", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids")
    choice = _choice(**fields)
    ordered = {name: choice[name] for name in order if name in choice}
    data = json.dumps(_chunk(ordered, **of_0_33), separators=(",", ":"), ensure_ascii=False).encode()
    assert type(parsing.parse(data)) is wire.Completion
    assert parsing.encode(parsing.parse(data)) == data
    assert UsualChunk.match(data_event(data)) is not None
    _check(data)


# --- any shape

_ODD: list[Any] = [None, True, -1, 1.5, [], {}, "x", [None], {"content": None}, [{"token_ids": [1]}]]
_ODD += [[1, 2], {"content": []}, {"content": "x", "y": 1}]


@pytest.mark.parametrize("name", [*_choice(), "stop_reason", "prompt_token_ids", "error", "model", "usage"])
def test_a_chunk_with_an_odd_field_is_read_as_if_field_by_field(name: str) -> None:
    for odd in _ODD:
        chunk = _chunk(_choice(**{name: odd}) if name in {*_choice(), "stop_reason"} else _choice())
        chunk |= {name: odd} if name in {*chunk, "prompt_token_ids", "error"} else {}
        _check(encoded(chunk))
        _check(encoded(chunk, spaced=True))


_USUAL = encoded(_chunk(_choice(delta={"content": "a\u00e9\nb"})))
_bytes = st.sampled_from(
    [bytes([byte]) for byte in b'"\\{}[],: \n0-.eE19uaN\x00\x80\xff'] + [b"null", b"NaN", b"{}"]
)
_edits = st.lists(
    st.tuples(st.integers(0, len(_USUAL)), st.integers(0, 12), _bytes | st.just(b"")), max_size=3
)


@given(_edits)
@example([(_USUAL.index(b"null"), 4, b'"stop"')])
@example([(_USUAL.index(b"[74]"), 4, b"[074]")])
@example([(_USUAL.index(b"[74]"), 4, b"[7,]")])
def test_any_bytes_are_read_as_if_field_by_field(edits: list[tuple[int, int, bytes]]) -> None:
    data = _USUAL
    for start, length, new in edits:
        data = data[:start] + new + data[start + length :]
    _check(data)


_texts = st.text('ab "\\\n\u00e9\U0001f600\x00{}[],:', max_size=5) | st.sampled_from(
    [
        '"},"logprobs":{"content":[{"token":"x"',
        ',"token_ids":[1,2]',
        '\\"}],"usage":{"prompt_tokens":1}}',
        '{"content":"x"},"logprobs":null',
    ]
)


@given(_texts, _texts, _texts, st.booleans())
def test_fields_of_evidence_in_a_text_are_text(content: str, token: str, model: str, escaped: bool) -> None:
    choice = _choice(delta={"content": content}, logprobs={"content": [_logprob(token)]})
    data = json.dumps(_chunk(choice, model=model), separators=(",", ":"), ensure_ascii=escaped).encode()
    assert type(parsing.parse(data)) is wire.Completion
    _check(data)
