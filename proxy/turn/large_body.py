"""Reads a large chat completion: its long arrays are cut out and converted once, without objects for ids.

An answer of 32k ids is 3 MB of JSON, nearly all of it log-probabilities. What remains without the arrays is
parsed as any completion. The arrays are found by their names in quotes and a bracket: in a JSON string the
quotes would have backslashes. A cut counts only if each array is valid by itself and the parsed rest holds
`CUT` exactly where the arrays belong; a body of another shape is read as a whole: see `reader`, `redactor`.
"""

from array import array
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.fields import NULL, raw_value
from proxy.history.completion import Completion, SampledChoice
from proxy.history.turn import WeightSpan, ids_array
from proxy.turn.chunk import ChoiceFields, Logprob, Usage
from proxy.turn.engine_json import CUT, CUT_FROM_BYTES, REFUSALS
from proxy.turn.redactor import redact_fields
from proxy.turn.request import Visible
from proxy.types import Fields
from tokenization import InvalidIds, ids

_PROMPT = b'"prompt_token_ids":['
_IDS = b'"token_ids":['
_LOGPROBS = b'"logprobs":{"content":['
_LAST_LOGPROB = b'"top_logprobs":[]}]'
_NULL = msgspec.Raw(NULL)


class _Logprobs(msgspec.Struct):
    content: msgspec.Raw


class _Choice(ChoiceFields, kw_only=True):
    message: dict[str, Any]
    token_ids: msgspec.Raw
    logprobs: _Logprobs | None = None


class _Rest(msgspec.Struct):
    choices: tuple[_Choice]
    usage: Usage | None = None
    prompt_token_ids: msgspec.Raw = _NULL


_decode_rest = msgspec.json.Decoder(_Rest).decode
_decode_logprobs = msgspec.json.Decoder(list[Logprob]).decode
_decode_object = msgspec.json.Decoder(Fields).decode
_decode_objects = msgspec.json.Decoder(list[Fields]).decode


@dataclass(frozen=True, slots=True)
class _Cut:
    """A completion and the arrays that were cut out of it; None for those that were not."""

    rest: bytes
    """The completion with `CUT` in place of each array."""
    ids: bytes
    """`choices[0].token_ids`."""
    logprobs: bytes | None
    """`choices[0].logprobs.content`."""
    prompt: bytes | None
    """`prompt_token_ids`."""


def read_large(body: bytes, sent: bytes, visible: Visible) -> tuple[Completion, bytes] | None:
    """A completion of one choice, and its JSON with the fields that the client requested.

    Args:
        sent: the prompt that was sent to the engine, as a JSON array; an equal echo is not converted.

    Returns:
        None if the body is small or has another shape than vLLM gives it.
    """
    if len(body) < CUT_FROM_BYTES or (cut := _cut(body)) is None:
        return None
    try:
        completion = _completion(cut, sent)
        return None if completion is None else (completion, _redacted(body, cut, visible))
    except (*REFUSALS, InvalidIds):
        return None


def _cut(body: bytes) -> _Cut | None:
    """Cut the arrays where vLLM writes them: log-probabilities, sampled ids, prompt; None without ids."""
    logprobs = _logprobs_span(body)
    token_ids = _ids_span(body, _IDS, logprobs[1] if logprobs else 0)
    if token_ids is None:
        return None
    prompt = _ids_span(body, _PROMPT, token_ids[1])
    view, end = memoryview(body), 0
    parts: list[bytes | memoryview] = []
    for span in (logprobs, token_ids, prompt):
        if span is not None:
            parts += view[end : span[0]], CUT
            end = span[1]
    rest = b"".join([*parts, view[end:]])
    return _Cut(rest, body[slice(*token_ids)], _slice(body, logprobs), _slice(body, prompt))


def _ids_span(body: bytes, name: bytes, after: int) -> tuple[int, int] | None:
    """The span of the first array of this name."""
    start = body.find(name, after) + len(name) - 1
    stop = body.find(b"]", start) + 1
    return (start, stop) if start >= len(name) - 1 and stop else None


def _logprobs_span(body: bytes) -> tuple[int, int] | None:
    """The span of the log-probabilities of one choice, without alternatives."""
    start = body.find(_LOGPROBS) + len(_LOGPROBS) - 1
    stop = body.rfind(_LAST_LOGPROB) + len(_LAST_LOGPROB)
    return (start, stop) if len(_LOGPROBS) <= start < stop else None


def _slice(body: bytes, span: tuple[int, int] | None) -> bytes | None:
    return None if span is None else body[slice(*span)]


def _completion(cut: _Cut, sent: bytes) -> Completion | None:
    """What the arrays and the rest hold; None if an array does not belong where it was.

    Raises:
        InvalidIds: ids that no turn can hold.
        msgspec.MsgspecError, UnicodeDecodeError, RecursionError: the rest is not a completion of one choice.
    """
    rest = _decode_rest(cut.rest)
    (choice,) = rest.choices
    logprobs = choice.logprobs
    held = choice.token_ids, _NULL if logprobs is None else logprobs.content, rest.prompt_token_ids
    arrays = cut.ids, cut.logprobs, cut.prompt
    if [bytes(raw) for raw in held] != [NULL if raw is None else CUT for raw in arrays]:
        return None
    sampled = SampledChoice(
        choice.index or 0,
        choice.message,
        ids_array(ids.pack_compact(cut.ids)),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        routed_experts=choice.routed_experts,
        weight_versions=tuple(
            WeightSpan(str(span.version), span.start, span.end) for span in choice.weight_versions or ()
        ),
        sampling_mask=choice.sampling_mask,
        raw_ids=cut.ids,
    )
    if cut.logprobs is not None:
        sampled.logprobs = array("f", [entry.logprob for entry in _decode_logprobs(cut.logprobs)])
    packed = None if cut.prompt is None or cut.prompt == sent else ids.pack_compact(cut.prompt)
    usage = rest.usage or Usage()
    return Completion(
        cut.prompt,
        [sampled],
        usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        packed_prompt=packed,
    )


def _redacted(body: bytes, cut: _Cut, visible: Visible) -> bytes:
    """The completion with the fields that the client requested; the shape of the rest was checked."""
    if visible.everything:
        return body
    fields = _decode_object(cut.rest)
    choices = _decode_objects(fields["choices"])
    choice = choices[0]
    if visible.ids:
        choice["token_ids"] = msgspec.Raw(cut.ids)
        fields["prompt_token_ids"] = msgspec.Raw(cut.prompt or NULL)
    if visible.logprobs and cut.logprobs is not None:
        choice["logprobs"] = msgspec.Raw((raw_value(choice, "logprobs") or b"").replace(CUT, cut.logprobs, 1))
    return redact_fields(fields, choices, visible)
