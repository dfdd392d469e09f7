"""Parses what vLLM answers into the structs of `wire`, once, for its record and for its client.

Long arrays are cut out of the JSON and converted without objects for ids. An answer of 32k ids is 3 MB of
JSON, nearly all of it log-probabilities, and a prompt of 100k ids is 600 KB. The arrays are found by their
names in quotes and a bracket: in a JSON string the quotes would have backslashes. A cut counts only if each
array is valid by itself and the parsed rest holds the mark exactly where the array belongs; else the whole
body is parsed.

A body that does not fit the structs, or that msgspec refuses, is read field by field: evidence of an unknown
shape is named in `OddChoice.odd`, and other fields of an unknown shape are left out.
"""

import json
from array import array
from secrets import randbelow
from typing import Any

import msgspec

from chat_tokenizer import InvalidIds, ids
from tokenproxy.base.errors import EngineBroken
from tokenproxy.record.turn import ids_array
from tokenproxy.turn.wire import (
    ALTERNATIVES,
    NO_REASON,
    REFUSALS,
    Choice,
    Completion,
    Logprob,
    Logprobs,
    OddChoice,
    TokenChoice,
    TokenCompletion,
    Usage,
)

CUT_FROM_BYTES = 16_384
"""Bytes of a body from which to cut arrays out, and convert them apart, is faster than to parse it whole."""
MARKED_IDS = [randbelow(2**31) for _ in range(4)]
MARK = msgspec.json.encode(MARKED_IDS)
"""Stands for an array of ids that was cut out: ids that neither clients nor engines know."""
MARKED_LOGPROBS = [-randbelow(2**50) / 2**20 for _ in range(3)]
LOGPROBS_MARK = msgspec.json.encode([{"logprob": logprob} for logprob in MARKED_LOGPROBS])
"""Stands for the log-probabilities that were cut out."""

_PROMPT = b'"prompt_token_ids":['
_IDS = b'"token_ids":['
_LOGPROBS = b'"logprobs":{"content":['
_LAST_LOGPROB = b'"top_logprobs":[]}]'
_PROMPT_FROM_BYTES = 1024
"""Bytes of a body from which the echoed prompt is cut out, which takes a microsecond."""
_MOST_DIGITS = 4300
"""The most digits of an integer that Python parses."""

Span = tuple[int, int]


class Parsed(msgspec.Struct, frozen=True, gc=False):
    """A completion or a chunk, its JSON, and the arrays that were cut out of that; None for the others."""

    completion: Completion
    json: bytes
    """With a mark in place of each array that was cut out."""
    prompt: bytes | None = None
    """`prompt_token_ids`."""
    ids: bytes | None = None
    """`choices[0].token_ids`."""
    logprobs: bytes | None = None
    """`choices[0].logprobs.content`."""


class _SampledLogprob(Logprob, gc=False):
    """A log-probability without alternatives; one with some is refused."""

    top_logprobs: tuple[()] = ()


_skip = msgspec.json.Decoder(msgspec.Raw).decode
_decode = msgspec.json.Decoder(Completion).decode
_decode_with_tokens = msgspec.json.Decoder(TokenCompletion).decode
_decode_logprobs = msgspec.json.Decoder(list[_SampledLogprob]).decode


def parse(body: bytes, *, tokens: bool = False, whole: bool = False, one_prompt: bool = True) -> Parsed:
    """Parse a completion or a chunk.

    Args:
        one_prompt: False for the completions route, whose choices echo their prompts.
        tokens: whether to read the tokens of log-probabilities. Alternatives are always read.
        whole: whether it is a whole completion, whose long arrays are then converted without objects for ids.

    Raises:
        EngineBroken: it is not a JSON object, or is nested too deeply.
    """
    size = len(body) if one_prompt else 0
    if size >= _PROMPT_FROM_BYTES:
        long = whole and not tokens and size >= CUT_FROM_BYTES
        for arrays in (True, False) if long else (False,):
            if (parsed := _parse_cut(body, tokens=tokens, arrays=arrays)) is not None:
                return parsed
    try:
        return Parsed(_decoded(body, tokens=tokens), body)
    except REFUSALS:
        pass
    fields = parse_leniently(body)
    if not isinstance(fields, dict):
        raise no_completion()
    return Parsed(_read(fields), body)


def is_json(body: bytes) -> bool:
    """Whether a body is valid JSON, of which nothing is made."""
    try:
        _skip(body)
        return True
    except REFUSALS:
        return False


def _decoded(body: bytes, *, tokens: bool) -> Completion:
    return _decode_with_tokens(body) if tokens or ALTERNATIVES in body else _decode(body)


def _parse_cut(body: bytes, *, tokens: bool, arrays: bool) -> Parsed | None:
    """Parse a completion without its arrays, which are cut out where vLLM writes them.

    Args:
        arrays: whether to cut out log-probabilities, sampled ids and prompt; else the prompt alone.

    Returns None if the sampled ids, or else the prompt, are not there, or an array belongs elsewhere.
    """
    logprobs = token_ids = None
    if arrays:
        logprobs = _logprobs_span(body)
        token_ids = _ids_span(body, _IDS, logprobs[1] if logprobs else 0)
    prompt = _ids_span(body, _PROMPT, token_ids[1] if token_ids else 0)
    if (token_ids if arrays else prompt) is None:
        return None
    rest = _without(body, (logprobs, LOGPROBS_MARK), (token_ids, MARK), (prompt, MARK))
    slices = [None if span is None else body[slice(*span)] for span in (prompt, token_ids, logprobs)]
    try:
        parsed = Parsed(_decoded(rest, tokens=tokens), rest, *slices)
        return parsed if _put_back(parsed) else None
    except (*REFUSALS, ValueError, InvalidIds):
        return None


def _put_back(cut: Parsed) -> bool:
    """Put converted arrays in place of their marks. Returns False if a mark has another place.

    Raises:
        ValueError: there are several choices.
        InvalidIds: no turn can hold these ids.
        msgspec.MsgspecError: the log-probabilities are none, or have alternatives.
    """
    completion = cut.completion
    if cut.prompt is not None:
        if completion.prompt_token_ids != msgspec.Raw(MARK):
            return False
        completion.prompt_token_ids = msgspec.Raw(cut.prompt)
    if cut.ids is None:
        return True
    (choice,) = completion.choices or ()
    logprobs = choice.logprobs.values if choice.logprobs else None
    if choice.token_ids != MARKED_IDS or (cut.logprobs is not None and logprobs != MARKED_LOGPROBS):
        return False
    choice.token_ids = ids_array(ids.pack_compact(cut.ids))
    if cut.logprobs is not None:
        entries = _decode_logprobs(cut.logprobs)
        choice.logprobs = Logprobs(token_logprobs=array("f", [entry.logprob for entry in entries]))
    return True


def _without(body: bytes, *marks: tuple[Span | None, bytes]) -> bytes:
    view, end = memoryview(body), 0
    parts: list[bytes | memoryview] = []
    for span, mark in marks:
        if span is not None:
            parts += view[end : span[0]], mark
            end = span[1]
    return b"".join([*parts, view[end:]])


def _ids_span(body: bytes, name: bytes, after: int) -> Span | None:
    """The span of the first array of this name."""
    start = body.find(name, after) + len(name) - 1
    stop = body.find(b"]", start) + 1
    return (start, stop) if start >= len(name) - 1 and stop else None


def _logprobs_span(body: bytes) -> Span | None:
    """The span of the log-probabilities of one choice, without alternatives."""
    start = body.find(_LOGPROBS) + len(_LOGPROBS) - 1
    stop = body.rfind(_LAST_LOGPROB) + len(_LAST_LOGPROB)
    return (start, stop) if len(_LOGPROBS) <= start < stop else None


# --- what msgspec refuses


def parse_leniently(data: bytes) -> Any:
    """Parse JSON as Python does: NaN and Infinity are numbers. What UTF-8 cannot hold is replaced.

    Raises:
        EngineBroken: it is not JSON, or is nested too deeply.
    """
    try:
        return _encodable(_lenient.decode(data.decode("utf-8-sig", "replace")))
    except (ValueError, RecursionError) as error:
        raise no_completion() from error


def dump(value: object) -> msgspec.Raw:
    """Encode a value of `parse_leniently` as JSON."""
    return msgspec.Raw(json.dumps(value, separators=(",", ":")).encode())


def encodable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def no_completion() -> EngineBroken:
    """The error for a body, or the data of an event, that is not a JSON object."""
    return EngineBroken("the engine's response is not a chat completion")


def _integer(digits: str) -> float:
    return int(digits) if len(digits) < _MOST_DIGITS else float(digits)


_lenient = json.JSONDecoder(parse_int=_integer)


def _read(fields: dict[str, Any]) -> Completion:
    """A completion or a chunk, field by field."""
    choices = fields.pop("choices", None)
    known, _ = _fitting(Completion, fields)
    if "usage" not in known and isinstance(usage := fields.get("usage"), dict):
        known["usage"] = Usage(**_fitting(Usage, usage)[0])
    if isinstance(choices, list):
        known["choices"] = tuple(_read_choice(choice) for choice in choices if isinstance(choice, dict))
    return Completion(**known)


def _read_choice(fields: dict[str, Any]) -> Choice:
    known, odd = _fitting(TokenChoice, fields)
    if "logprobs" in odd and (logprobs := _as(Logprobs, fields["logprobs"])) is not None:
        known["logprobs"] = logprobs  # without its alternatives
        odd.remove("logprobs")
    if "message" in odd:
        known["message"] = {}
    if "delta" in odd and "text" not in known:
        known["delta"] = {"": fields["delta"]}  # an empty one: nothing was sampled
    if "finish_reason" in odd and fields["finish_reason"]:
        known["finish_reason"] = NO_REASON
    evidence = tuple(name for name in ("index", "token_ids", "logprobs") if name in odd)
    return OddChoice(**known, odd=evidence)


def _fitting(kind: type[msgspec.Struct], fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields that have the types which a struct declares, and the names of the others."""
    known: dict[str, Any] = {}
    odd: list[str] = []
    for field in msgspec.structs.fields(kind):
        value = fields.get(field.name)
        if value is None:
            continue
        known[field.name] = dump(value) if field.type is msgspec.Raw else _as(field.type, value)
        if known[field.name] is None:
            del known[field.name]
            odd.append(field.name)
    return known, odd


def _as(kind: Any, value: object) -> Any:
    """The value if it has the type `kind`; else None."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.MsgspecError:
        return None


def _encodable(value: Any) -> Any:
    """A value whose strings can all be encoded."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    if isinstance(value, dict):
        return {encodable(name): _encodable(item) for name, item in value.items()}
    return value
