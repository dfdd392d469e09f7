"""The request, as clients send it."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from proxy.dialects.messages.blocks import Content, Message, Text, ToolAddition, ToolRemoval
from proxy.dialects.messages.definitions import Tool, ToolChoice
from proxy.errors import BadRequest
from proxy.fields import check_utf8

JsonObject = dict[str, msgspec.Raw]


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


_decode = msgspec.json.Decoder(MessagesRequest).decode
_AT = " - at `$"
_MISSING = "Object missing required field `"


def read_request(body: bytes) -> MessagesRequest:
    """Parse a request to count tokens.

    Raises:
        BadRequest: a field is missing or wrong; `param` is its path, such as `messages[2].content[0].type`.
    """
    check_utf8(body)
    try:
        request = _decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"the request body is not valid JSON: {error}", param="body") from error
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


def _invalid(problem: str) -> BadRequest:
    """The error for what msgspec reports: `Expected int, got str - at $.messages[0].role`."""
    text, _, path = problem.partition(_AT)
    path = path.rstrip("`").removeprefix(".")
    if text.startswith(_MISSING):
        path, text = f"{path}.{text.removeprefix(_MISSING)}".strip(".`"), "required"
    elif not path:
        path, text = "body", "the request body must be a JSON object"
    return BadRequest(f"{path}: {text}", param=path)


def _refuse_tool_changes(content: Content, path: str) -> None:
    if isinstance(content, str):
        return
    for index, block in enumerate(content):
        if isinstance(block, ToolAddition | ToolRemoval):
            raise BadRequest(
                f"{path}[{index}].type: tools change in messages with the role `system` only",
                param=f"{path}[{index}].type",
            )
