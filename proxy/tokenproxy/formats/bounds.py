"""Bounds on what a request's fields hold, so that no request stops the others or fills the memory.

A JSON parser keeps the interpreter's lock while it makes objects, which take up to thirty times the bytes of
their JSON. A text is only copied, so its length is bounded by the body's alone. What is bounded is the number
of values of each field, and the bytes of those fields that are also digested value by value.
"""

import re
from collections.abc import Iterator

from tokenproxy.base.errors import BodyTooLarge
from tokenproxy.base.fields import parse
from tokenproxy.formats.prompt_fields import ALIASES

CHECKED_FROM_BYTES = 2**18
"""Bytes of a body from which it is checked. Any smaller one is parsed in milliseconds."""
MOST_KEYS = 200_000
"""The most keys of objects in a body whose keys take less than `BYTES_PER_KEY` each, with their values."""
BYTES_PER_KEY = 30
MOST_DENSE = 100_000
"""The most values of a field whose values take less than `BYTES_PER_VALUE` each."""
BYTES_PER_VALUE = 12
MOST_VALUES = 500_000
"""The most values of any field. A conversation of that many is parsed in 50 ms."""
MOST_IDS = 2_000_000
"""The most numbers of a field in `_WITH_IDS`, whose numbers do not count as values."""
MOST_OPTION_BYTES = 2**21
"""The most bytes of a field in `OPTIONS`."""
OPTIONS = (
    *("tools", "functions", "tool_choice", "chat_template_kwargs", "documents", "chat_template"),
    *("response_format", "structured_outputs", "mm_processor_kwargs", "media_io_kwargs", "metadata"),
    *("sampling_params", "text", "reasoning", "stop", "logit_bias", "vllm_xargs", "model"),
)
"""Fields besides the conversation that are read or digested as a whole."""
_WITH_IDS = frozenset(
    {
        *(*ALIASES, "token_ids", "prompt", "prompts", "required_prefix_token_ids"),
        *("messages", "append_messages", "sampling_params", "generation_kwargs"),
        *("stop_token_ids", "allowed_token_ids", "logit_bias"),
    }
)
"""Fields that hold ids: their lists of numbers are not read into objects."""
_PART = 2**18
_PROMPT = re.compile(rb'"(?:%b)": ?\[' % "|".join(ALIASES).encode())
_START = 65_536
"""Bytes in which the array of ids of a large body must begin."""


def check_bounds(body: bytes) -> None:
    """Check the body of a request of any wire format, in steps of a millisecond, so that other threads run.

    Raises:
        BadRequest: the body is not a JSON object.
        BodyTooLarge: it holds too much; `param` names the field.
    """
    keys = values = 0
    for part in _parts_without_ids(body):
        keys += part.count(b":")
        values += sum(map(part.count, (b"[", b"{", b",")))
    if len(body) <= MOST_OPTION_BYTES and keys + values <= MOST_DENSE:
        return  # with the marks in texts, which count here too
    most = max(MOST_KEYS, len(body) // BYTES_PER_KEY)
    if keys > most and sum(outside.count(b":") for outside in _outside_texts(body)) > most:
        _refuse("body", f"with {len(body)} bytes it may hold {most} keys of objects")
    for name, raw in parse(body).items():
        if (view := memoryview(raw)).nbytes > CHECKED_FROM_BYTES:
            _check_field(name, bytes(view))


def _check_field(name: str, value: bytes) -> None:
    """Raise BodyTooLarge if a field holds too much."""
    if name in OPTIONS and len(value) > MOST_OPTION_BYTES:
        _refuse(name, f"it may take {MOST_OPTION_BYTES} bytes, and takes {len(value)}")
    most = min(MOST_VALUES, max(MOST_DENSE, len(value) // BYTES_PER_VALUE))
    marks = (b'"', b"[", b"{") if name in _WITH_IDS else (b",", b"[", b"{", b":")
    values = items = 0
    for outside in _outside_texts(value):
        values += sum(map(outside.count, marks))
        items += outside.count(b",")
        if values > most:
            _refuse(name, f"with {len(value)} bytes it may hold {most} values")
        if items > MOST_IDS:
            _refuse(name, f"it may hold {MOST_IDS} numbers")


def _parts_without_ids(body: bytes) -> Iterator[bytes]:
    """A body in parts, without the prompt's ids if a list of numbers begins near the start."""
    start = end = 0
    if (found := _PROMPT.search(body, 0, _START)) is not None:
        first, last = found.end() - 1, body.find(b"]", found.end()) + 1
        if body.find(b'"', first, last) < 0:
            start, end = first, last
    for since, until in ((0, start), (end, len(body))):
        for first in range(since, until, _PART):
            yield body[first : min(first + _PART, until)]


def _outside_texts(value: bytes) -> Iterator[bytes]:
    """JSON without its texts, in parts: `{"a":["b,c",1]}` gives `{":[",1]}`, a mark for each text."""
    start, inside = 0, False
    while start < len(value):
        part = value[start : start + _PART]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # an escape is not cut
            part = value[start : start + _PART + 1]
        start += len(part)
        if b"\\" in part:
            part = part.replace(rb"\\", b"").replace(rb"\"", b"")
        pieces = part.split(b'"')
        yield b'"'.join(pieces[inside::2])
        inside ^= len(pieces) % 2 == 0


def _refuse(field: str, problem: str) -> None:
    raise BodyTooLarge(f"`{field}` is too large: {problem}", param=field)
