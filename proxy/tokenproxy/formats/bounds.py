"""Bounds on what a request's fields hold, so that no request stops the others or fills the memory.

A JSON parser keeps the interpreter's lock while it makes objects, which take up to thirty times the bytes of
their JSON. A text is only copied, so its length is bounded by the body's alone. What is bounded is the number
of values, and the bytes of those fields that are also digested value by value.
"""

from tokenproxy.base.errors import BodyTooLarge
from tokenproxy.base.fields import raw_value, values_in
from tokenproxy.formats.prompt_fields import parse_with_ids

CHECKED_FROM_BYTES = 2**18
"""Bytes of a body from which it is checked. Any smaller one is parsed in milliseconds."""
MOST_VALUES = 1_000_000
"""The most arrays, objects and fields in a body: more than a context of a million ids holds."""
MOST_ITEMS = 2_000_000
"""The most commas in a body: they separate ids too, and stand in texts."""
MOST_OPTION_BYTES = 2**21
"""The most bytes of a field in `OPTIONS`."""
MOST_OPTION_VALUES = 400_000
"""The most values of a field in `OPTIONS`."""
OPTIONS = (
    *("tools", "functions", "tool_choice", "chat_template_kwargs", "documents", "chat_template"),
    *("response_format", "structured_outputs", "mm_processor_kwargs", "media_io_kwargs", "metadata"),
    *("sampling_params", "text", "reasoning", "stop", "logit_bias", "vllm_xargs"),
)
"""Fields besides the conversation that are read into objects."""
_PART = 2**18
_LARGE = (
    *("messages", "append_messages", "input", "system", "prompt", "prompts"),
    *("tools", "functions", "chat_template_kwargs", "documents", "response_format", "structured_outputs"),
)
"""Fields that hold many values, whose names are seldom those of something inside another field."""


def check_bounds(body: bytes) -> None:
    """Check the body of a request of any wire format, in steps of a millisecond, so that other threads run.

    Raises:
        BadRequest: the body is not a JSON object.
        BodyTooLarge: it holds too much; `param` names the field.
    """
    values = items = 0
    for start in range(0, len(body), _PART):
        part = body[start : start + _PART]
        values += part.count(b"[") + part.count(b"{") + part.count(b":")
        items += part.count(b",")
        if values > MOST_VALUES or items > MOST_ITEMS:
            most = f"{MOST_VALUES} values" if values > MOST_VALUES else f"{MOST_ITEMS} commas"
            _refuse(_field_at(body, start + _PART), f"a request may hold {most}")
    if len(body) <= MOST_OPTION_BYTES and values <= MOST_OPTION_VALUES // 4:
        return  # a list of as many numbers as fit is read in milliseconds
    fields = parse_with_ids(body)
    for name in OPTIONS:
        value = raw_value(fields, name) or b""
        if len(value) > MOST_OPTION_BYTES:
            _refuse(name, f"it may take {MOST_OPTION_BYTES} bytes, and takes {len(value)}")
        if values_in(value) > MOST_OPTION_VALUES:
            _refuse(name, f"it may hold {MOST_OPTION_VALUES} values")


def _refuse(field: str, problem: str) -> None:
    raise BodyTooLarge(f"`{field}` is too large: {problem}", param=field)


def _field_at(body: bytes, end: int) -> str:
    """The field that seems to stand at a position: for an error, before which no text is worth scanning."""
    at = {name: body.find(b'"%b":' % name.encode(), 0, end) for name in _LARGE}
    field = max(at, key=lambda name: at[name])
    return field if at[field] >= 0 else "body"
