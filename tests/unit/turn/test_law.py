"""Laws of reading and redacting, for any completion."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.turn.bodies import (
    Body,
    CompletionReader,
    chunk,
    encoded,
    end,
    logprobs_of,
    piece,
    read_completion,
    redact_chunk,
    redact_completion,
    whole,
    whole_choice,
)
from tokenproxy.base.request import Visible
from tokenproxy.record.completion import Completion, SampledChoice
from tokenproxy.record.turn import pack_ids, pack_logprobs
from tokenproxy.turn.answer import Redactor

_SECRETS = range(2**30 + 2**29 + 54_321, 2**30 + 2**29 + 54_331)
"""Ids that stand nowhere but where an engine puts them."""
_text = st.text('a"\\\ud800\u00e9', max_size=3)
"""With characters that JSON escapes, and one that has no UTF-8."""
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=6,
)
_near_misses = st.sampled_from(
    [
        *([1.5], ["1"], [2**31], [-1], [[1]], [{"version": 1, "start": 0}], [{"index": []}]),
        *({"content": None}, {"content": [{}]}),
        *({"content": [{"logprob": None}]}, {"content": [{"logprob": float("nan")}]}),
    ]
)


def _odd(*names: str) -> st.SearchStrategy[Body]:
    return st.dictionaries(st.sampled_from(names), _json | _near_misses, max_size=3)


_top = _odd("choices", "usage", "prompt_token_ids", "error")
_choice = st.tuples(
    _odd(
        "index", "message", "delta", "token_ids", "logprobs", "finish_reason", "stop_reason", "routed_experts"
    )
    | _odd("weight_versions"),
    _odd("content", "reasoning", "tool_calls", "role"),
)
_visible = st.builds(
    Visible, ids=st.booleans(), logprobs=st.booleans(), usage=st.booleans(), running_usage=st.booleans()
) | st.just(Visible(ids=False, logprobs=False, reasoning=False))


def _check(completion: Completion) -> None:
    """What was read can be stored."""
    indices = [choice.index for choice in completion.choices]
    assert len(set(indices)) == len(indices)
    assert completion.prompt_ids is None or pack_ids(json.loads(completion.prompt_ids)) is not None
    for choice in completion.choices:
        assert choice.ids is None or min(choice.ids, default=0) >= 0
        pack_ids(choice.ids or ())
        pack_logprobs(choice.logprobs or ())
        assert isinstance(choice.message, dict)
        assert isinstance(choice.finish_reason, str | None)
        assert isinstance(choice.stop_reason, str | int | None)


def _hides(data: bytes, visible: Visible) -> None:
    """Nothing is shown that was not requested."""
    kept = json.loads(data)
    choices = kept.get("choices")
    choices = [one for one in choices if isinstance(one, dict)] if isinstance(choices, list) else []
    if not visible.ids:
        assert kept.get("prompt_token_ids") is None
        assert not any(choice.get("token_ids") for choice in choices)
        assert not any(str(secret).encode() in data for secret in _SECRETS)
    if not visible.logprobs:
        assert not any(choice.get("logprobs") for choice in choices)


@given(_top, st.lists(_choice, min_size=1, max_size=2), _visible, st.booleans())
def test_odd_evidence_never_fails_a_whole_completion_nor_shows_ids(
    top: Body, choices: list[tuple[Body, Body]], visible: Visible, spaced: bool
) -> None:
    body = whole(
        *[
            whole_choice(index, token_ids=list(_SECRETS[:2]), message={"content": "hi", **message}) | odd
            for index, (odd, message) in enumerate(choices)
        ],
        prompt_token_ids=list(_SECRETS[-9:]),
    )
    data = encoded(body | top, spaced=spaced)
    _check(read_completion(data))
    _hides(redact_completion(data, visible), visible)


@given(_top, st.lists(_choice, min_size=1, max_size=4), _visible)
def test_odd_evidence_never_fails_a_stream_nor_shows_ids(
    top: Body, pieces: list[tuple[Body, Body]], visible: Visible
) -> None:
    reader, redactor = CompletionReader(expected=2), Redactor(visible)
    returned = []
    for position, (odd, delta) in enumerate(pieces):
        body = chunk(
            piece(position % 2, ids=list(_SECRETS[:2]), delta={"content": "hi", **delta}) | odd,
            prompt_token_ids=list(_SECRETS[-9:]),
            usage={"completion_tokens": 2},
        )
        data = encoded(body | top)
        reader.read(data)
        returned += reader.rest(ended=True).choices
        if (kept := redact_chunk(redactor, data)) is not None:
            _hides(kept, visible)
    rest = reader.rest()
    _check(Completion(rest.prompt_ids, returned + rest.choices))


# --- streams are whole completions in pieces

_words = st.text('ab "\\\n\u00e9\U0001f600', max_size=5)
_ids = st.integers(0, 2**31 - 1)
_logprob = st.floats(max_value=0, allow_infinity=False, width=32)
_pieces = st.lists(st.tuples(_words, st.lists(st.tuples(_ids, _logprob), min_size=1, max_size=3)), max_size=4)
_sampled = st.tuples(_pieces, st.sampled_from(["stop", "length"]), st.none() | _words | _ids)


def _whole(made: list[Any]) -> bytes:
    choices = [
        whole_choice(
            index,
            message={"role": "assistant", "content": "".join(text for text, _ in parts) if parts else None},
            token_ids=[token for _, sampled in parts for token, _ in sampled] + [2],
            logprobs=logprobs_of(*[one for _, sampled in parts for _, one in sampled], -0.5),
            finish_reason=reason,
            stop_reason=stop,
        )
        for index, (parts, reason, stop) in enumerate(made)
    ]
    return encoded(whole(*choices, usage=None))


def _chunks(made: list[Any]) -> list[bytes]:
    roles = [piece(index, ids=None, delta={"role": "assistant"}) for index in range(len(made))]
    chunks = [chunk(*roles, prompt_token_ids=[5, 6])]
    for position in range(max(len(parts) for parts, _, _ in made) + 1):
        for index, (parts, reason, stop) in enumerate(made):
            if position < len(parts):
                text, sampled = parts[position]
                ids, logprobs = [token for token, _ in sampled], logprobs_of(*[one for _, one in sampled])
                part = piece(index, text, ids, logprobs=logprobs)
                chunks.append(chunk(part, usage={"completion_tokens": 1}))
            elif position == len(parts):
                chunks.append(chunk(end(index, finish_reason=reason, stop_reason=stop)))
    return [encoded(one) for one in chunks]


@given(st.lists(_sampled, min_size=1, max_size=3), _visible)
def test_stream_is_read_and_redacted_as_a_whole_completion(made: list[Any], visible: Visible) -> None:
    """What was redacted is read as the client would."""
    redactor, reader, client = Redactor(visible), CompletionReader(len(made)), CompletionReader(len(made))
    read: list[SampledChoice] = []
    for data in _chunks(made):
        reader.read(data)
        read += reader.rest(ended=True).choices
        if (kept := redact_chunk(redactor, data)) is not None:
            client.read(kept)
    shown = client.rest()
    assert reader.complete and client.complete
    expected = read_completion(_whole(made))
    redacted = read_completion(redact_completion(_whole(made), visible))
    for choice in (*read, *shown.choices, *expected.choices, *redacted.choices):
        choice.counted = None
    assert reader.rest() == Completion(expected.prompt_ids)
    assert sorted(read, key=lambda choice: choice.index) == expected.choices
    assert shown.prompt_ids == redacted.prompt_ids
    assert sorted(shown.choices, key=lambda choice: choice.index) == redacted.choices
