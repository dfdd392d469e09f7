"""The definitions of tools, and the choice between them, as clients send them."""

from typing import Literal

import msgspec

_NULL = msgspec.Raw(b"null")


class Tool(msgspec.Struct):
    """The definition of a tool."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = _NULL
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolChoice(msgspec.Struct):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None
