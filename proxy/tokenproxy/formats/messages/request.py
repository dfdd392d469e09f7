"""The request, as clients send it.

Fields of blocks that are not listed here, such as `cache_control` and `citations`, are ignored.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tokenproxy.base.errors import BadRequest
from tokenproxy.base.fields import NULL, decode

JsonObject = dict[str, msgspec.Raw]
_NULL = msgspec.Raw(NULL)


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
    """Names the turn; see `tokenproxy.record.echo`."""


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


class ThinkingEnabled(msgspec.Struct, tag_field="type", tag="enabled"):
    """Thinking with a budget."""

    budget_tokens: Annotated[int, Meta(ge=1024)]


class ThinkingDisabled(msgspec.Struct, tag_field="type", tag="disabled"):
    """No thinking."""


class ThinkingAdaptive(msgspec.Struct, tag_field="type", tag="adaptive"):
    """Thinking as much as the model chooses."""


class ThinkingBetweenTools(msgspec.Struct, tag_field="type", tag="between_tools"):
    """Thinking after results of tools only."""


class OutputFormat(msgspec.Struct):
    """A schema for the text of the answer."""

    type: Literal["json_schema"] = "json_schema"
    schema: JsonObject | None = None


class OutputConfig(msgspec.Struct):
    """How much effort to spend, and the format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesRequest(msgspec.Struct):
    """The fields that are read. docs/messages.md says of every other field why it is ignored."""

    model: Annotated[str, Meta(min_length=1)]
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Required, except to count tokens."""
    system: str | list[Text] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingEnabled | ThinkingDisabled | ThinkingAdaptive | ThinkingBetweenTools | None = None
    output_config: OutputConfig | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    # fields of vLLM
    chat_template_kwargs: JsonObject | None = None
    cache_salt: str | None = None
    kv_transfer_params: JsonObject | None = None
    ec_transfer_params: JsonObject | None = None
    vllm_xargs: JsonObject | None = None
    watermarking: bool | None = None
    # the proxy's own
    thinking_policy: str | None = None
    echo_policy: str | None = None


_decoder = msgspec.json.Decoder(MessagesRequest)


def read_request(body: bytes) -> MessagesRequest:
    """Parse a request to count tokens.

    Raises:
        BadRequest: a field is missing or wrong; `param` is its path, such as `messages[2].content[0].type`.
    """
    request = decode(body, _decoder)
    for index, message in enumerate(request.messages):
        if message.role != "system":
            _refuse_tool_changes(message.content, f"messages[{index}].content")
    return request


def read_turn(body: bytes) -> MessagesRequest:
    """Parse a request for a turn.

    Raises:
        BadRequest: as `read_request`; or the limits for its answer are missing or do not fit together.
    """
    request = read_request(body)
    if request.max_tokens is None:
        raise BadRequest("max_tokens: required", param="max_tokens")
    thinking = request.thinking
    if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens >= request.max_tokens:
        raise BadRequest(
            "thinking.budget_tokens: must be less than `max_tokens`", param="thinking.budget_tokens"
        )
    return request


def _refuse_tool_changes(content: Content, path: str) -> None:
    if isinstance(content, str):
        return
    for index, block in enumerate(content):
        if isinstance(block, ToolAddition | ToolRemoval):
            raise BadRequest(
                f"{path}[{index}].type: tools change in messages with the role `system` only",
                param=f"{path}[{index}].type",
            )
