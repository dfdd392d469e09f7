"""Converts messages from the form that OpenAI clients send to the form that chat templates take.

The forms differ: clients may send content as text or as parts, send the arguments of tool calls as JSON text,
use either of two names for reasoning, and address the model as `developer`. The conversion is the one that
vLLM makes before it renders (vllm/renderers/chat_utils.py and hf.py), so that text rendered here equals text
rendered there. Where vLLM refuses a message, this conversion may accept it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chat_tokenizer.errors import InvalidMessages

Message = Mapping[str, Any]
"""A chat message of the OpenAI API, as parsed from JSON."""
Tools = Sequence[Mapping[str, Any]]
"""Tools as a client declares them, parsed from JSON."""
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
"""The values of `type` of content parts that hold text."""
IMAGE_PARTS = frozenset({"image_url", "input_image"})
"""The values of `type` of content parts that hold an image by its URL."""
_IMAGE = "image"
"""The `type` of an image in the form for templates, which is converted to itself."""
_TOOL_REFERENCE = "tool_reference"
PART_FIELDS = frozenset(
    {"type", "text", "refusal", "thinking", "closed", "name", "uuid", "prompt_cache_breakpoint"}
    | {"image_embeds", "image_pil", "image_url", "video_embeds", "video_url"}
    | {"audio_embeds", "audio_url", "input_audio", "file", "data"}
)
"""Fields that vLLM reads in some kind of part. The template gets any other field of a text part."""
_BILLING_HEADER = "x-anthropic-billing-header"
"""Start of a line that vLLM removes from system messages, because it changes with every request."""
_OBJECT = (dict, Mapping)
"""`dict` comes first, because the check against an abstract class is slow."""
CALL_FIELDS = dict.fromkeys(["id", "function", "type"])
FUNCTION_FIELDS = dict.fromkeys(["arguments", "name"])
_TOOL_FIELDS = dict.fromkeys(["function", "type"])
_DEFINITION_FIELDS = dict.fromkeys(["name", "description", "parameters", "strict"])
"""Fields in the order of vLLM's parser, because templates print whole objects as JSON."""


def holds_media(messages: Iterable[Message]) -> bool:
    """Whether a message has a part that is no text, such as an image. Templates may number them."""
    return any(
        isinstance(part, Mapping) and ("text" not in part or part.get("type", "text") not in TEXT_PARTS)
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
    )


def check_appended(
    new: Sequence[Message], history: Sequence[Message] | None, tools: object, kwargs: object
) -> None:
    """Check the arguments of an append, and their types for callers without a type checker.

    Raises:
        InvalidMessages: one of them has a wrong type, there are no new messages, or the history does not end
            with an assistant turn.
    """
    arguments = (("the new messages", new), ("`history`", history), ("`tools`", tools))
    for name, values in arguments:
        if values is not None and (not isinstance(values, Sequence) or isinstance(values, str | bytes)):
            raise InvalidMessages(f"{name} must be a list, not {type(values).__name__}")
    # a history may be long, so it is not read completely here
    if not all(isinstance(message, Mapping) for message in [*new, *(history or [])[-1:]]):
        raise InvalidMessages("every message must be an object")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidMessages(f"`template_kwargs` must be an object, not {type(kwargs).__name__}")
    if not new:
        raise InvalidMessages("must not be empty")
    if history is not None and (not history or history[-1].get("role") != "assistant"):
        raise InvalidMessages("`history` must end with the assistant turn")


def for_template(
    messages: Sequence[Message], *, parts: bool = False, developer: bool = True
) -> list[dict[str, Any]]:
    """Convert messages as vLLM converts them for a template.

    If the template does not support the role `developer`, a conversation that has such a message gets all of
    its system and developer messages merged into one system message at the start. The result then has other
    positions than `messages`, and a new message may change the start of the rendering instead of its end; so
    `Template.refuse_merged` refuses it. Otherwise each message keeps its position.

    Args:
        parts: convert content to a list of parts (content format "openai"); otherwise to one text, its parts
            joined by line feeds. Tool results become one text always, unless they refer to tools.
        developer: whether the template supports the role `developer`.

    Raises:
        InvalidMessages: a message is not an object, has no role, or holds a part that is not text.
    """
    converted = [_convert(message, index, parts) for index, message in enumerate(messages)]
    if not developer and any(message["role"] == "developer" for message in converted):
        return _merge_system(converted)
    return converted


def _convert(message: Message, index: int, parts: bool) -> dict[str, Any]:
    if not isinstance(message, _OBJECT):
        raise InvalidMessages(f"message {index} must be an object")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidMessages(f"message {index} needs a role")
    result: dict[str, Any] = {"role": role, "content": _content(message.get("content"), role, index, parts)}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            if not isinstance(calls, list):
                raise InvalidMessages(f"tool calls of message {index} must be a list")
            result["tool_calls"] = [_convert_call(call, index) for call in calls]
        reasoning = message.get("reasoning")
        reasoning = message.get("reasoning_content") if reasoning is None else reasoning
        if reasoning is not None:
            result["reasoning"] = result["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        result["tool_call_id"] = message["tool_call_id"]
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            result[key] = message[key]
    if role == "developer":
        result["tools"] = _developer_tools(message.get("tools"))
    return result


def _content(content: object, role: str, index: int, parts: bool) -> str | list[dict[str, Any]]:
    """A message's content as one text, or as a list of parts."""
    as_parts = parts and role != "tool"
    if isinstance(content, str) and not (role == "system" and content.startswith(_BILLING_HEADER)):
        return [{"type": "text", "text": content}] if as_parts else content
    if content is None:
        return [] if as_parts else ""
    if not isinstance(content, str | list):
        raise InvalidMessages(f"content of message {index} must be a string or a list of parts")
    given = [content] if isinstance(content, str) else content
    listed = [_part(part, index) for part in given if not _is_null(part)]
    if not parts and any(part["type"] == _IMAGE for part in listed):
        raise InvalidMessages(f"message {index} holds an image, and the template takes content as text only")
    if role == "system":
        listed = _without_billing_header(listed)
    if as_parts or (parts and any(part["type"] != "text" for part in listed)):
        return listed
    texts = [part.get("text") or part.get("name") or "" for part in listed]
    # vLLM keeps empty texts of tool results in the format "openai" only
    return "\n".join(texts if parts else filter(None, texts))


def _part(part: object, index: int) -> dict[str, Any]:
    """A part of type "text", "tool_reference" or "image", from any form of it that clients send."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict) and len(part) == 2 and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return part  # almost every part has this form
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind == _TOOL_REFERENCE:
        if not isinstance(part.get("name"), str | None):
            raise InvalidMessages(f"a tool reference in message {index} holds no name")
        return {"type": _TOOL_REFERENCE, "name": part.get("name")}
    if isinstance(part, Mapping) and (kind == _IMAGE or image_url(part) is not None):
        return {"type": _IMAGE, **{key: value for key, value in part.items() if key not in PART_FIELDS}}
    if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise InvalidMessages(f"message {index} holds a part of type {kind!r}: send text parts only")
    text = part.get(kind if kind in ("refusal", "thinking") else "text")
    if not isinstance(text, str) or part.get("uuid") is not None:
        raise InvalidMessages(f"a text part in message {index} holds no text")
    result = {"type": "text", "text": text}
    if len(part) > 2:
        result.update((key, value) for key, value in part.items() if key not in PART_FIELDS)
    return result


def _is_null(part: object) -> bool:
    """Whether it is a part that vLLM skips, because its text is null or missing."""
    return (
        isinstance(part, Mapping)
        and (kind := part.get("type")) in ("text", "refusal")
        and part.get("uuid") is None
        and part.get(kind) is None
    )


def image_url(part: Mapping[str, Any]) -> str | None:
    """The URL in a content part that is an image; None if it is another part, or an image without a URL.

    As OpenAI's chat route has it, `{"type": "image_url", "image_url": {"url": URL}}`, and as its Responses
    route has it, `{"type": "input_image", "image_url": URL}`.
    """
    kind = part.get("type", "image_url")
    if not isinstance(kind, str) or kind not in IMAGE_PARTS or part.get("uuid") is not None:
        return None
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    return url if isinstance(url, str) else None


def _without_billing_header(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parts without their first line where that is the header; a part that holds nothing else is dropped."""
    kept = []
    for part in parts:
        if part["type"] != "text" or not part["text"].startswith(_BILLING_HEADER):
            kept.append(part)
        elif rest := part["text"].partition("\n")[2]:
            kept.append({**part, "text": rest})
    return kept


def _convert_call(call: object, index: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, _OBJECT) else None
    if not isinstance(call, _OBJECT) or not isinstance(function, _OBJECT):
        raise InvalidMessages(f"tool calls of message {index} must be objects with a function")
    if call.get("type", "function") != "function":
        raise InvalidMessages(f"tool calls of message {index} must be of type 'function'")
    result, definition = _ordered(call, CALL_FIELDS), _ordered(function, FUNCTION_FIELDS)
    definition["arguments"] = arguments_of(function)
    result["function"] = definition
    return result


def arguments_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a called function as vLLM renders them: an object, empty if there are none.

    Arguments that are not valid JSON become an empty object, as in vLLM, so that they do not end a
    conversation.
    """
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, _OBJECT) else {}


def _developer_tools(tools: object) -> object:
    """The tools of a developer message with their fields in vLLM's order; others are left as they are."""
    if not isinstance(tools, list):
        return tools
    functions = [tool.get("function") if isinstance(tool, Mapping) else None for tool in tools]
    if not all(isinstance(function, Mapping) and "name" in function for function in functions):
        return tools
    if not all(tool.get("type") == "function" for tool in tools):
        return tools
    return [
        {**_ordered(tool, _TOOL_FIELDS), "function": _ordered(tool["function"], _DEFINITION_FIELDS)}
        for tool in tools
    ]


def _ordered(values: Mapping[str, Any], first: Mapping[str, None]) -> dict[str, Any]:
    """Reorder an object: first the keys in `first`, then all others."""
    if first.keys() <= values.keys():
        return {**first, **values}
    return {**{key: values[key] for key in first if key in values}, **values}


def _merge_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge all system and developer messages into one system message at the start.

    A single such message at the start keeps its content and other fields.
    """
    system = [message for message in messages if message["role"] in ("system", "developer")]
    if len(system) == 1 and messages[0] is system[0]:
        first = {key: value for key, value in system[0].items() if key != "tools"}
        return [{**first, "role": "system"}, *messages[1:]]
    texts = [text for message in system if (text := _text_of(message["content"]))]
    others = [message for message in messages if message["role"] not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _text_of(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if "text" in part)


def tools_for_template(tools: Tools | None) -> list[Any] | None:
    """Convert tools from the form that OpenAI clients send; None if there are none.

    vLLM parses the tools of a request and writes them anew, so the fields of each tool have its order, and a
    missing description is null. Templates print tools as JSON, so both change the prompt.

    Example: `{"function": {"name": "f", "x": 1}, "y": 2}` becomes
    `{"type": "function", "function": {"name": "f", "description": null, "parameters": null}}`.
    A tool that is not a function with a name is not changed: vLLM refuses it.
    """
    return [_convert_tool(tool) for tool in tools] if tools else None


def arguments_for_template(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The template's arguments without those that are null or "auto".

    vLLM leaves these out (`merge_kwargs` in vllm/renderers/params.py), so that the server's defaults apply.
    """
    return {name: value for name, value in kwargs.items() if value is not None and value != "auto"}


def _convert_tool(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return tool
    deferred = tool.get("defer_loading")
    definition = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    optional = {
        "strict": function.get("strict"),
        "defer_loading": deferred if function.get("defer_loading") is None else function["defer_loading"],
    }
    definition.update((key, value) for key, value in optional.items() if value is not None)
    converted = {"type": "function", "function": definition}
    return converted if deferred is None else {**converted, "defer_loading": deferred}
