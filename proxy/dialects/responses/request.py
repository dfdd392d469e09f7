"""The fields of a request, as the fields of a chat completion."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from proxy.dialects.responses.content import Item, text_field
from proxy.dialects.responses.items import TRIGGER, as_input, item_kind
from proxy.dialects.responses.tools import Tools, choice_of, tools_of
from proxy.errors import BadRequest
from proxy.fields import check_utf8, parse, raw, raw_value, read
from proxy.types import Fields

_AS_THEY_ARE = (
    "model", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "user",
    # vLLM's own
    "top_k", "min_p", "repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "skip_special_tokens", "include_stop_str_in_output", "structured_outputs", "chat_template_kwargs",
    "chat_template", "media_io_kwargs", "mm_processor_kwargs", "priority", "cache_salt", "vllm_xargs",
    "kv_transfer_params", "ec_transfer_params", "watermarking", "include_reasoning",
    # the proxy's own
    "thinking_policy",
)  # fmt: skip
"""Fields that have the same name and meaning in a chat completion."""
_NOT_HERE: Mapping[str, str] = {
    "background": "this server answers while the client waits",
    "conversation": "send `previous_response_id`, or all items of the conversation",
    "prompt": "this server keeps no prompt templates: send `instructions` and `input`",
}
"""Fields that change the meaning of a request and that this server does not know, with the reason."""
_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"


class _Format(msgspec.Struct):
    type: str = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class _Text(msgspec.Struct):
    format: _Format | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A request of `/v1/responses`, read once."""

    fields: Fields
    """As the client sent them."""
    input: list[Item]
    """The items, without the trigger of a compaction."""
    tools: Tools
    previous: str | None
    """`previous_response_id`."""
    instructions: str | None
    store: bool
    stream: bool
    compact: bool
    """Whether the model is to summarise the conversation."""
    summary: bool
    """Whether the client requested reasoning as a summary."""
    encrypted: bool
    """Whether it requested the encrypted content of reasoning."""
    logprobs: bool
    own_limit: bool
    """Whether the client itself limited the number of sampled ids."""


def read_request(body: bytes, *, compact: bool = False) -> ResponsesRequest:
    """Read a request.

    Args:
        compact: whether it is one of `/v1/responses/compact`.

    Raises:
        BadRequest: a field cannot be read, or changes the meaning of the request in a way that this server
            does not know; `param` names it.
    """
    check_utf8(body)
    fields = parse(body)
    for name, reason in _NOT_HERE.items():
        if raw_value(fields, name) not in (None, b"false"):
            raise BadRequest(f"`{name}` is not supported: {reason}", param=name)
    previous = read(fields, "previous_response_id", str)
    items = _input(fields, previous)
    reasoning = read(fields, "reasoning", _Reasoning) or _Reasoning()
    include = read(fields, "include", list[str]) or []
    top_logprobs = read(fields, "top_logprobs", int)
    request = ResponsesRequest(
        fields,
        items,
        tools_of(read(fields, "tools", list[Any]) or []),
        previous,
        read(fields, "instructions", str),
        read(fields, "store", bool) is not False,
        not compact and bool(read(fields, "stream", bool)),
        compact,
        (reasoning.summary or reasoning.generate_summary) is not None,
        _ENCRYPTED in include,
        _LOGPROBS in include or bool(top_logprobs),
        read(fields, "max_output_tokens", int) is not None,
    )
    if items and item_kind(items[-1], "input") == TRIGGER:
        request = replace(request, input=items[:-1], compact=True)
    return request


def chat_fields(request: ResponsesRequest) -> Fields:
    """The fields of the chat completion, but for its messages.

    Raises:
        BadRequest: a field cannot be read; `param` names it.
    """
    fields: Fields = {
        name: request.fields[name]
        for name in _AS_THEY_ARE
        if name in request.fields and raw_value(request.fields, name) is not None
    }
    if request.own_limit:
        fields["max_tokens"] = request.fields["max_output_tokens"]
    if request.stream:
        fields["stream"] = raw(True)
        fields["stream_options"] = raw({"include_usage": True})
    if request.logprobs:
        fields["logprobs"] = raw(True)
        if top_logprobs := raw_value(request.fields, "top_logprobs"):
            fields["top_logprobs"] = msgspec.Raw(top_logprobs)
    reasoning = read(request.fields, "reasoning", _Reasoning)
    if reasoning is not None and reasoning.effort is not None:
        fields["reasoning_effort"] = raw(reasoning.effort)
    if not request.compact and (form := _response_format(request.fields)) is not None:
        fields["response_format"] = raw(form)
    _add_tools(fields, request)
    return fields


def _input(fields: Fields, previous: str | None) -> list[Item]:
    value = read(fields, "input", Any)
    if value is None and previous is None:
        raise BadRequest("`input` is required", param="input")
    items = as_input([] if value is None else value)
    if not items and previous is None:
        raise BadRequest("`input` must not be empty: send at least one item", param="input")
    for index, item in enumerate(items[:-1]):
        if item_kind(item, f"input[{index}]") == TRIGGER:
            raise BadRequest(f"`input[{index}]` must be the last item", param=f"input[{index}].type")
    return items


def _add_tools(fields: Fields, request: ResponsesRequest) -> None:
    choice = choice_of(read(request.fields, "tool_choice", Any), request.tools)
    if not request.tools.functions:
        return
    fields["tools"] = raw(request.tools.functions)
    if request.compact:
        choice = "none"  # the tools stay, so that the prompt continues the conversation
    if choice is not None:
        fields["tool_choice"] = raw(choice)
    parallel = read(request.fields, "parallel_tool_calls", bool)
    if parallel is not None:
        fields["parallel_tool_calls"] = raw(parallel)


def _response_format(fields: Fields) -> Item | None:
    text = read(fields, "text", _Text)
    form = text.format if text else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    if form.type != "json_schema":
        raise BadRequest(
            "`text.format.type` must be text, json_schema or json_object", param="text.format.type"
        )
    if form.schema is None:
        raise BadRequest("`text.format.schema` is required", param="text.format.schema")
    name = text_field({"name": form.name}, "name", "text.format")
    schema: Item = {"name": name, "schema": form.schema}
    for key, value in (("description", form.description), ("strict", form.strict)):
        if value is not None:
            schema[key] = value
    return {"type": "json_schema", "json_schema": schema}
