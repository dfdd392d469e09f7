"""Evidence that is cut out of a chunk leaves the bytes that parsing the chunk would leave."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.engine.sse import data_event, event_data
from proxy.errors import EngineBroken
from proxy.turn.reader import StreamReader
from proxy.turn.redactor import StreamRedactor
from proxy.turn.usual_chunk import UsualChunk
from proxy.turn.visible import Visible
from tests.unit.turn.bodies import NOTHING, Body, encoded, redact_chunk

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


def _arguments(text: str) -> Body:
    return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}


def _outcome(redactor: StreamRedactor, data: bytes, *, parse: bool) -> bytes | str | None:
    try:
        return redactor.parse(data) if parse else redact_chunk(redactor, data)
    except EngineBroken as error:
        return str(error)


def _cut(data: bytes, visible: Visible = NOTHING) -> bytes | None:
    usual = UsualChunk.match(data_event(data))
    kept = None if usual is None else usual.redacted(visible)
    return None if kept is None else event_data(kept)


def _check(data: bytes) -> None:
    added, read = StreamReader(), StreamReader()
    usual = UsualChunk.match(data_event(data))
    role = b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}'
    added.read(role)
    if usual is not None and added.add(usual):
        read.read(role)
        read.read(data)
        assert added.rest() == read.rest()
    for visible in _VISIBLE:
        redactor = StreamRedactor(visible)
        if not visible.every_chunk:
            assert _outcome(redactor, data, parse=False) == _outcome(redactor, data, parse=True)


@pytest.mark.parametrize(
    "choice",
    [
        _choice(),
        _choice(stop_reason=None, token_ids=[]),
        _choice(index=3, delta={"content": ""}),
        _choice(delta={"reasoning": "so"}),
        _choice(delta={"reasoning_content": "so"}),
        _choice(delta=_arguments('{"a": "b\\n')),
        _choice(logprobs=None),
        _choice(token_ids=[1, 22, 333], logprobs={"content": [_logprob()] * 3}),
        _choice(logprobs={"content": [_logprob(value=-9999.0, bytes=None)]}),
        _choice(logprobs={"content": [_logprob(top_logprobs=[_CANDIDATE, _CANDIDATE])]}),
        _choice(delta={"content": 'é\U0001f600"\\/\n\t\x01,"token_ids":[1],"logprobs":{}}],"usage":{}'}),
    ],
)  # fmt: skip
def test_the_chunks_of_vllm_are_cut(choice: Body) -> None:
    order = ("index", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids")
    ordered = {name: choice[name] for name in order if name in choice}
    data = json.dumps(_chunk(ordered), separators=(",", ":"), ensure_ascii=False).encode()
    assert _cut(data) is not None
    _check(data)


def test_a_chunk_is_cut() -> None:
    assert _cut(encoded(_chunk(_choice()))) == (
        b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1763683200,"model":"m","choices":'
        b'[{"index":0,"delta":{"content":"Hi"},"logprobs":null,"finish_reason":null,"token_ids":null}]}'
    )


def test_a_chunk_of_one_id_is_read_without_parsing() -> None:
    reader = StreamReader()
    reader.read(
        encoded(_chunk(_choice(delta={"role": "assistant", "content": ""}, token_ids=[], logprobs=None)))
    )
    for text, token_id in (("\n", 74), ("é", 75)):
        chunk = UsualChunk.match(
            data_event(encoded(_chunk(_choice(delta={"content": text}, token_ids=[token_id]))))
        )
        assert chunk is not None
        assert reader.add(chunk)
    [read] = reader.rest().choices
    assert (read.message["content"], read.ids, read.logprobs) == ("\né", [74, 75], [-0.5, -0.5])
    assert read.counted == 1


@pytest.mark.parametrize(
    "choice",
    [
        _choice(token_ids=[]),
        _choice(token_ids=[2**31]),
        _choice(token_ids=[1, 2], logprobs={"content": [_logprob()] * 2}),
        _choice(logprobs=None),
        _choice(delta={"reasoning": "so"}),
        _choice(index=70_000),
    ],
)
def test_chunks_that_are_parsed_to_be_read(choice: Body) -> None:
    chunk = UsualChunk.match(data_event(encoded(_chunk(choice))))
    assert chunk is not None
    assert chunk.piece() is None


def test_reasoning_is_left_to_the_parser() -> None:
    hides = Visible(ids=False, logprobs=False, reasoning=False)
    assert _cut(encoded(_chunk(_choice())), hides) is not None
    assert _cut(encoded(_chunk(_choice(delta={"reasoning": "so"}))), hides) is None


# --- any shape

_texts = st.text('ab "\\\n\u00e9\U0001f600\x00{}[],:', max_size=5) | st.sampled_from(
    [
        '"},"logprobs":{"content":[{"token":"x"',
        ',"token_ids":[1,2]',
        '\\"}],"usage":{"prompt_tokens":1}}',
        '{"content":"x"},"logprobs":null',
        "\\",
    ]
)
_odd = st.sampled_from([None, True, -1, 1.5, [], {}, "x", [None], {"content": None}, [{"token_ids": [1]}]])
_naturals = st.integers(0, 2**31 - 1)
_entries = st.builds(
    _logprob,
    _texts,
    st.floats(allow_nan=True),
    top_logprobs=st.just([]) | st.lists(st.builds(_logprob, _texts), max_size=1) | _odd,
    bytes=st.none() | st.lists(_naturals, max_size=2),
)
_deltas = (
    st.fixed_dictionaries({"content": _texts})
    | st.dictionaries(st.sampled_from(["role", "content", "reasoning", "x"]), _texts | _odd, max_size=2)
    | st.builds(_arguments, _texts)
)
_CHOICE = {
    "index": st.integers(0, 2),
    "delta": _deltas,
    "logprobs": st.none() | st.fixed_dictionaries({"content": st.lists(_entries, max_size=2)}),
    "finish_reason": st.just(None),
    "stop_reason": st.just(None),
    "token_ids": st.lists(_naturals, max_size=3),
}
_CHUNK = {
    "usage": st.just(_USAGE) | st.dictionaries(st.sampled_from(["a", "b"]), _naturals | _odd, max_size=2),
    "prompt_token_ids": st.lists(_naturals, max_size=2),
    "error": _odd,
    "model": _texts,
}


@st.composite
def _changed(draw: st.DrawFn, fields: dict[str, st.SearchStrategy[Any]], *usual: str) -> Body:
    """A body with the usual fields, and perhaps with another one, and with one that is odd or missing."""
    names = {*usual, *draw(st.lists(st.sampled_from(sorted(fields)), max_size=1))}
    body = {name: draw(fields[name]) for name in fields if name in names}
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=1)):
        body[name] = draw(_odd)
        if draw(st.booleans()):
            del body[name]
    return body


_choices = _changed(_CHOICE, "index", "delta", "logprobs", "finish_reason", "token_ids")


@settings(deadline=None)
@given(st.lists(_choices, max_size=2), _changed(_CHUNK, "usage"), st.booleans(), st.booleans())
def test_any_chunk_is_redacted_as_if_it_were_parsed(
    choices: list[Body], fields: Body, spaced: bool, escaped: bool
) -> None:
    chunk = {**_chunk(*choices), **fields}
    separators = None if spaced else (",", ":")
    _check(json.dumps(chunk, separators=separators, ensure_ascii=escaped).encode())


# --- any bytes

_USUAL = encoded(_chunk(_choice(delta={"content": "a\u00e9\nb"})))
_bytes = st.sampled_from(
    [bytes([byte]) for byte in b'"\\{}[],: \n0-.eE19uaN\x00\x80\xff'] + [b"null", b"NaN", b"{}"]
)
_edits = st.lists(
    st.tuples(st.integers(0, len(_USUAL)), st.integers(0, 12), _bytes | st.just(b"")), max_size=3
)


@settings(deadline=None, max_examples=500)
@given(_edits)
@example([(_USUAL.index(b"null"), 4, b'"stop"')])
@example([(_USUAL.index(b"[74]"), 4, b"[074]")])
@example([(_USUAL.index(b"[74]"), 4, b"[7,]")])
def test_any_bytes_are_redacted_as_if_they_were_parsed(edits: list[tuple[int, int, bytes]]) -> None:
    data = _USUAL
    for start, length, new in edits:
        data = data[:start] + new + data[start + length :]
    _check(data)


@settings(deadline=None)
@given(st.lists(_texts, min_size=3, max_size=3), st.booleans())
def test_fields_of_evidence_in_a_text_are_text(texts: list[str], escaped: bool) -> None:
    content, token, model = texts
    choice = _choice(delta={"content": content}, logprobs={"content": [_logprob(token)]})
    data = json.dumps(_chunk(choice, model=model), separators=(",", ":"), ensure_ascii=escaped).encode()
    _check(data)
    if not escaped:
        assert _cut(data) is not None
