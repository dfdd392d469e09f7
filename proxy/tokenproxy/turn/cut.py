"""Long arrays are cut out of JSON and converted once, without objects for ids.

An answer of 32k ids is 3 MB of JSON, nearly all of it log-probabilities, and a prompt of 100k ids is 600 KB.
What remains without the arrays is parsed as any completion. The arrays are found by their names in quotes and
a bracket: in a JSON string the quotes would have backslashes. A cut counts only if each array is valid by
itself and the parsed rest holds the mark exactly where the array belongs; else the whole body is parsed.
"""

import secrets
from secrets import randbelow

import msgspec

REFUSALS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors with which msgspec refuses a value."""
CUT_FROM_BYTES = 16_384
"""Bytes of a body from which to cut arrays out, and convert them apart, is faster than to parse it whole."""
MARKED_IDS = [randbelow(2**31) for _ in range(4)]
MARK = msgspec.json.encode(MARKED_IDS)
"""Stands for an array of ids that was cut out: ids that neither clients nor engines know."""
MARKED_LOGPROBS = [-secrets.randbelow(2**50) / 2**20 for _ in range(3)]
LOGPROBS_MARK = msgspec.json.encode([{"logprob": logprob} for logprob in MARKED_LOGPROBS])
"""Stands for the log-probabilities that were cut out."""

_PROMPT = b'"prompt_token_ids":['
_IDS = b'"token_ids":['
_LOGPROBS = b'"logprobs":{"content":['
_LAST_LOGPROB = b'"top_logprobs":[]}]'

Span = tuple[int, int]


class Cut(msgspec.Struct, frozen=True, gc=False):
    """A completion and the arrays that were cut out of it; None for those that were not."""

    rest: bytes
    """The completion with a mark in place of each array."""
    prompt: bytes | None = None
    """`prompt_token_ids`."""
    ids: bytes | None = None
    """`choices[0].token_ids`."""
    logprobs: bytes | None = None
    """`choices[0].logprobs.content`."""


def cut_prompt(body: bytes) -> Cut | None:
    """Cut the echoed prompt out; None if there is none."""
    span = _ids_span(body, _PROMPT, 0)
    if span is None:
        return None
    return Cut(_without(body, (span, MARK)), body[slice(*span)])


def cut_arrays(body: bytes) -> Cut | None:
    """Cut the arrays out where vLLM writes them: log-probabilities, sampled ids, prompt; None without ids."""
    logprobs = _logprobs_span(body)
    token_ids = _ids_span(body, _IDS, logprobs[1] if logprobs else 0)
    if token_ids is None:
        return None
    prompt = _ids_span(body, _PROMPT, token_ids[1])
    rest = _without(body, (logprobs, LOGPROBS_MARK), (token_ids, MARK), (prompt, MARK))
    return Cut(rest, _slice(body, prompt), _slice(body, token_ids), _slice(body, logprobs))


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


def _slice(body: bytes, span: Span | None) -> bytes | None:
    return None if span is None else body[slice(*span)]
