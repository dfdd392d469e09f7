"""The fields of a request, as the fields of a chat completion."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokenproxy.base.errors import BadRequest
from tokenproxy.base.fields import decode, parse, raw, raw_value
from tokenproxy.base.types import Fields
from tokenproxy.formats.responses.items import (
    CUSTOM_INPUT,
    SETTINGS,
    TOOLS,
    TRIGGER,
    Item,
    as_input,
    flat_name,
    item_kind,
    kind_of,
    text_field,
)
from tokenproxy.turn.lenient import encodable

_AS_THEY_ARE = (
    "model", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "user",
    # vLLM's own
    "top_k", "min_p", "repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "skip_special_tokens", "include_stop_str_in_output", "structured_outputs", "chat_template_kwargs",
    "chat_template", "media_io_kwargs", "mm_processor_kwargs", "priority", "cache_salt", "vllm_xargs",
    "kv_transfer_params", "ec_transfer_params", "watermarking", "include_reasoning",
    # the proxy's own
    "thinking_policy",
    "echo_policy",
)  # fmt: skip
"""Fields that have the same name and meaning in a chat completion."""
_NOT_HERE: Mapping[str, str] = {
    "background": "this server answers while the client waits",
    "conversation": "send `previous_response_id`, or all items of the conversation",
    "prompt": "this server keeps no prompt templates: send `instructions` and `input`",
}
"""Fields that change the meaning of a request and that this server does not know, with the reason."""
_LEFT_OUT = (
    "web_search",
    "web_search_preview",
    "image_generation",
    "tool_search",
    "file_search",
    "code_interpreter",
)
"""Types, or beginnings of dated types, of tools that a provider runs by itself and a model can do without.
Codex sends some of them with every request."""
_CUSTOM_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        CUSTOM_INPUT: {"type": "string", "description": "The freeform text payload for this tool."}
    },
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request."""

    functions: list[Item] = field(default_factory=list)
    """As a chat completion has them."""
    custom: frozenset[str] = frozenset()
    """Names of the functions that stand for custom tools."""
    spaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Namespace and name of the functions of namespaces, by the names that the model sees."""

    @property
    def names(self) -> set[str]:
        """All names that the model sees."""
        return {function["function"]["name"] for function in self.functions}


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


class _Fields(msgspec.Struct):
    """The fields that are read."""

    model: Any = None
    """The engine refuses what is no name."""
    input: Any = None
    previous_response_id: str | None = None
    instructions: str | None = None
    store: bool | None = None
    stream: bool | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    reasoning: _Reasoning | None = None
    text: _Text | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A request of `/v1/responses`, read once."""

    fields: Fields
    """As the client sent them."""
    read: _Fields
    input: list[Item]
    """The items, without the trigger of a compaction."""
    tools: Tools
    compact: bool
    """Whether the model is to summarise the conversation."""
    stream: bool

    @property
    def store(self) -> bool:
        """Whether the response is stored."""
        return self.read.store is not False

    @property
    def summary(self) -> bool:
        """Whether the client requested reasoning as a summary."""
        reasoning = self.read.reasoning
        return reasoning is not None and (reasoning.summary or reasoning.generate_summary) is not None

    @property
    def encrypted(self) -> bool:
        """Whether it requested the encrypted content of reasoning."""
        return "reasoning.encrypted_content" in (self.read.include or ())

    @property
    def logprobs(self) -> bool:
        """Whether it requested log-probabilities."""
        return "message.output_text.logprobs" in (self.read.include or ()) or bool(self.read.top_logprobs)


_decode = msgspec.json.Decoder(_Fields)


def read_request(body: bytes, *, compact: bool = False) -> ResponsesRequest:
    """Read a request.

    Args:
        compact: whether it is one of `/v1/responses/compact`.

    Raises:
        BadRequest: a field cannot be read, or changes the meaning of the request in a way that this server
            does not know; `param` names it.
    """
    asked, fields = decode(body, _decode), parse(body)
    for name, reason in _NOT_HERE.items():
        if raw_value(fields, name) not in (None, b"false"):
            raise BadRequest.of(name, f"is not supported: {reason}")
    if asked.input is None and asked.previous_response_id is None:
        raise BadRequest.of("input", "is required")
    items = as_input([] if asked.input is None else asked.input)
    if not items and asked.previous_response_id is None:
        raise BadRequest.of("input", "must not be empty: send at least one item")
    for index, item in enumerate(items[:-1]):
        if item_kind(item, f"input[{index}]") == TRIGGER:
            raise BadRequest(f"`input[{index}]` must be the last item", param=f"input[{index}].type")
    stream = bool(asked.stream) and not compact
    if items and item_kind(items[-1], "input") == TRIGGER:
        items, compact = items[:-1], True
    tools = [(f"tools[{index}]", tool) for index, tool in enumerate(asked.tools or [])]
    for at, item in _items_of(TOOLS, items):
        tools += [(f"{at}.tools[{index}]", tool) for index, tool in enumerate(_list(item, "tools", at))]
    return ResponsesRequest(fields, asked, items, tools_of(tools), compact, stream)


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
    asked = request.read
    values: dict[str, Any] = {"max_tokens": asked.max_output_tokens}
    if request.stream:
        values |= {"stream": True, "stream_options": {"include_usage": True}}
    if request.logprobs:
        values |= {"logprobs": True, "top_logprobs": asked.top_logprobs}
    values["reasoning_effort"] = asked.reasoning.effort if asked.reasoning else None
    for at, item in _items_of(SETTINGS, request.input):
        settings = item.get("reasoning")
        if not isinstance(settings, dict):
            raise BadRequest.of(f"{at}.reasoning", "must be an object")
        values["reasoning_effort"] = text_field(settings, "effort", f"{at}.reasoning")
    if asked.text is not None and not request.compact:
        values["response_format"] = _response_format(asked.text.format)
    choice = choice_of(asked.tool_choice, request.tools)
    if request.tools.functions:
        values |= {"tools": request.tools.functions, "parallel_tool_calls": asked.parallel_tool_calls}
        # the tools stay, so that the prompt continues the conversation
        values["tool_choice"] = "none" if request.compact else choice
    return fields | {name: raw(value) for name, value in values.items() if value is not None}


def _items_of(kind: str, items: list[Item]) -> Iterator[tuple[str, Item]]:
    """The items of one type, each with its path in the request."""
    for index, item in enumerate(items):
        if item.get("type") == kind:
            yield f"input[{index}]", item


def _response_format(form: _Format | None) -> Item | None:
    """`response_format` of a chat completion; None for a text. Raises BadRequest."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    if form.type != "json_schema":
        raise BadRequest.of("text.format.type", "must be text, json_schema or json_object")
    if form.schema is None:
        raise BadRequest.of("text.format.schema", "is required")
    if form.name is None:
        raise BadRequest.of("text.format.name", "is required")
    schema = {
        "name": form.name,
        "schema": form.schema,
        "description": form.description,
        "strict": form.strict,
    }
    return {
        "type": "json_schema",
        "json_schema": {name: value for name, value in schema.items() if value is not None},
    }


# --- tools


def unwrapped_input(arguments: str) -> str:
    """The input of a custom tool's call; the arguments themselves if the model wrote others."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return encodable(text) if isinstance(text, str) else arguments


def tools_of(tools: list[tuple[str, Any]]) -> Tools:
    """The tools of a request.

    Args:
        tools: each with its path in the request.

    Raises:
        BadRequest: a tool cannot be read, or is of a type without which its client cannot work as it expects.
    """
    functions: list[Item] = []
    custom: set[str] = set()
    spaces: dict[str, tuple[str, str]] = {}
    for at, tool in tools:
        kind = kind_of(tool, at)
        if kind == "function":
            functions.append(_function(tool, text_field(tool, "name", at)))
        elif kind == "custom":
            functions.append(_custom(tool, at))
            custom.add(tool["name"])
        elif kind == "namespace":
            space = text_field(tool, "name", at)
            for place, inner in enumerate(_list(tool, "tools", at)):
                inside = f"{at}.tools[{place}]"
                if kind_of(inner, inside) == "function":
                    name = text_field(inner, "name", inside)
                    spaces[flat_name(space, name)] = (space, name)
                    functions.append(_function(inner, flat_name(space, name)))
        elif not kind.startswith(_LEFT_OUT):
            raise BadRequest.of(
                f"{at}.type",
                f"is `{kind}`, which this server does not run: it takes `function`, `custom` and `namespace`",
            )
    return Tools(functions, frozenset(custom), spaces)


def choice_of(choice: object, tools: Tools) -> object:
    """`tool_choice` of a chat completion; None to leave it out.

    Raises:
        BadRequest: it cannot be read, or names a tool that the request does not have.
    """
    if choice is None or (not tools.functions and choice in ("auto", "none")):
        return None
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise BadRequest.of("tool_choice", "must be auto, none, required or an object")
        if not tools.functions:
            raise BadRequest.of("tool_choice", f"is {choice}, and there are no `tools`")
        return choice
    kind = kind_of(choice, "tool_choice")
    assert isinstance(choice, dict)
    if kind not in ("function", "custom"):
        raise BadRequest.of("tool_choice.type", f"is `{kind}`: this server takes `function` and `custom`")
    name = text_field(choice, "name", "tool_choice")
    matching = [flat for flat, (_, local) in tools.spaces.items() if local == name]
    if name not in tools.names and len(matching) != 1:
        raise BadRequest.of("tool_choice", f"names `{name}`, which is not in `tools`")
    return {"type": "function", "function": {"name": name if name in tools.names else matching[0]}}


def _function(tool: Item, name: str) -> Item:
    shown = {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {"name": name, **shown}}


def _custom(tool: Item, at: str) -> Item:
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        raise BadRequest.of(
            f"{at}.format",
            "is a grammar, which no engine follows here: give the tool the format `text`, or "
            "make it a function",
        )
    name = text_field(tool, "name", at)
    return _function({**tool, "parameters": _CUSTOM_PARAMETERS, "strict": None}, name)


def _list(tool: Item, name: str, at: str) -> list[Any]:
    value = tool.get(name)
    if not isinstance(value, list):
        raise BadRequest.of(f"{at}.{name}", "must be a list")
    return value
