"""The content blocks of a message, as clients send them.

Fields that are not listed here, such as `cache_control` and `citations`, are ignored.
"""

from typing import Literal

import msgspec

from proxy.dialects.messages.definitions import Tool

_NULL = msgspec.Raw(b"null")


class Source(msgspec.Struct):
    """Where an image is: in `data`, base64-encoded, or at `url`."""

    type: str | None = None
    media_type: str = "image/jpeg"
    data: str = ""
    url: str = ""

    @property
    def location(self) -> str:
        """The URL of the image, as chat completions take it."""
        return self.url if self.type == "url" else f"data:{self.media_type};base64,{self.data}"


class Text(msgspec.Struct, tag_field="type", tag="text"):
    """A text."""

    text: str | None = None


class Image(msgspec.Struct, tag_field="type", tag="image"):
    """An image."""

    source: Source | None = None


class Thinking(msgspec.Struct, tag_field="type", tag="thinking"):
    """The reasoning of an assistant."""

    thinking: str | None = None
    signature: str | None = None
    """Names the turn; see `proxy.history.echo`."""


class RedactedThinking(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Reasoning that another model's provider has encrypted. It is ignored."""


class ToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: msgspec.Raw = _NULL
    """An object. Others are accepted, because a model may have sampled them."""


class ResultPart(msgspec.Struct):
    """A part of the result of a tool. Only the types text, image and tool_reference count."""

    type: str | None = None
    text: msgspec.Raw = _NULL
    source: msgspec.Raw = _NULL
    tool_name: msgspec.Raw = _NULL
    name: msgspec.Raw = _NULL


class ToolResult(msgspec.Struct, tag_field="type", tag="tool_result"):
    """The result of a call. Whether it is an error (`is_error`) is in no prompt, as in vLLM."""

    tool_use_id: str
    content: str | list[ResultPart] | None = None


class ToolReference(msgspec.Struct, tag_field="type", tag="tool_reference"):
    """The name of a tool that a search found. It counts in the content of a result only."""


class NamedTool(msgspec.Struct, tag_field="type", tag="tool_reference"):
    """A tool of the request."""

    name: str


class DefinedTool(msgspec.Struct, tag_field="type", tag="tool_definition"):
    """A tool that the request does not list."""

    definition: Tool


class ToolAddition(msgspec.Struct, tag_field="type", tag="tool_addition"):
    """A tool that the model has from here on."""

    tool: NamedTool | DefinedTool


class ToolRemoval(msgspec.Struct, tag_field="type", tag="tool_removal"):
    """A tool that the model no longer has."""

    tool: NamedTool


Block = (
    Text
    | Image
    | Thinking
    | RedactedThinking
    | ToolUse
    | ToolResult
    | ToolReference
    | ToolAddition
    | ToolRemoval
)
Content = str | list[Block]


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content
