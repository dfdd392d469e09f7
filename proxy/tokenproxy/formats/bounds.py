"""Bounds on what a request's fields hold, so that no request stops the others or fills the memory.

A JSON parser keeps the interpreter's lock while it makes objects, which take up to thirty times the bytes of
their JSON. A text is only copied, so its length is bounded by the body's alone. What is bounded is the number
of values, and the bytes of those fields that are also digested value by value.
"""

import re

from tokenproxy.base.errors import BodyTooLarge
from tokenproxy.base.fields import raw_value, values_in
from tokenproxy.formats.prompt_fields import parse_with_ids

CHECKED_FROM_BYTES = 2**18
"""Bytes of a body from which it is checked; a smaller one is parsed in milliseconds, whatever it holds."""
MOST_VALUES = 1_000_000
"""The most arrays, objects and names of fields in a body: more than a context of a million ids holds."""
MOST_OPTION_BYTES = 2**21
"""The most bytes of a field in `OPTIONS`."""
MOST_OPTION_VALUES = 200_000
"""The most values of a field in `OPTIONS`."""
OPTIONS = (
    *("tools", "functions", "tool_choice", "chat_template_kwargs", "documents", "chat_template"),
    *("response_format", "structured_outputs", "mm_processor_kwargs", "media_io_kwargs", "metadata"),
    *("sampling_params", "text", "reasoning", "stop", "logit_bias", "vllm_xargs"),
)
"""Fields besides the conversation that are read into objects."""
_PART = 2**18
_TOKEN = re.compile(rb'"((?:[^"\\]|\\.)*)"(\s*:)?|[\[\]{}]', re.DOTALL)


def check_bounds(body: bytes) -> None:
    """Check the body of a request of any wire format, in steps of a millisecond, so that other threads run.

    Raises:
        BadRequest: the body is not a JSON object.
        BodyTooLarge: it holds too much; `param` names the field.
    """
    values = 0
    for start in range(0, len(body), _PART):
        values += values_in(body[start : start + _PART])
        if values > MOST_VALUES:
            _refuse(_field_at(body[: start + _PART]), f"a request may hold {MOST_VALUES} values")
    if len(body) <= MOST_OPTION_BYTES and values <= MOST_OPTION_VALUES:
        return
    fields = parse_with_ids(body)
    for name in OPTIONS:
        value = raw_value(fields, name) or b""
        if len(value) > MOST_OPTION_BYTES:
            _refuse(name, f"it may take {MOST_OPTION_BYTES} bytes, and takes {len(value)}")
        if values_in(value) > MOST_OPTION_VALUES:
            _refuse(name, f"it may hold {MOST_OPTION_VALUES} values")


def _refuse(field: str, problem: str) -> None:
    raise BodyTooLarge(f"`{field}` is too large: {problem}", param=field)


def _field_at(start: bytes) -> str:
    """The field of a JSON object in which its first bytes end."""
    depth, field = 0, b"body"
    for token in _TOKEN.finditer(start):
        if token[1] is None:
            depth += 1 if token[0] in b"[{" else -1
        elif depth == 1 and token[2]:
            field = token[1]
    return field.decode(errors="replace")
