"""Digests that recognise a message in every spelling of it that clients send.

Laws, for messages `a` and `b`:

    canonical(a).strict == canonical(b).strict      exactly if `a` and `b` differ in spelling only
    strict equal  =>  loose equal                   but not the other way round
    chain(messages[:n], ...) == chain(messages, ...)[:n]

Spelling is what clients and JSON libraries change unintentionally:

- content: "" = null = missing = []. Text parts = their texts joined by line feeds, as engines join them, so
  one part = its string. `cache_control` of a part is ignored.
- arguments of a tool call: a JSON text = the same JSON with other white space, escapes or key order = the
  object. "" = null = missing = {}.
- reasoning: `reasoning_content` = `reasoning`, which takes precedence. "" = null = missing.
- `refusal`: "" = null = missing.
- `tool_calls`: [] = null = missing. A missing `type` of a call = "function".
- every other field: null = missing. Fields that reach no prompt are ignored, in the message, in its text
  parts and in its tool calls.

Everything else distinguishes messages: white space in text, the role (developer is not system), the order of
tool calls and their ids, 1 and 1.0 (they print differently), true and 1, Unicode normal forms, images, audio
and every other part that is not text. In doubt, messages differ: a missed match costs a rendering, which is
reported; a false match would put the tokens of another conversation into a prompt.

Arguments compare as plain text if they are not JSON, or if parsing them loses information or fails in some
parsers: repeated keys, NaN, Infinity, numbers beyond the range of a float, integers with more digits than
Python parses, and nesting deeper than `lossless_json.MAX_DEPTH`.

A matcher compares `strict` first. A client may drop the reasoning of an assistant message, strip its content
and write the defaults of tools into its calls before it sends the message back; `loose` ignores all three. It
also ignores whether a whole number in arguments is a float: clients in JavaScript send 1.0 back as 1. And it
ignores U+FFFD at the end of the content: where sampling stopped within a character, engines show no text for
its first bytes, and a client that decodes the ids itself gets U+FFFD for them. `loose` ignores *edited*
reasoning as well, so check a match on `loose` alone with `CanonicalMessage.is_copy_of`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from chat_tokenizer.errors import InvalidMessages
from chat_tokenizer.lossless_json import pack, parse
from chat_tokenizer.messages import TEXT_PARTS, Message

_DIGEST_SIZE = 16
_ARGUMENTS_INDEX = 3
"""Index of the arguments in the list that `_call` returns for a function call."""
_REPLACEMENT = "\ufffd"
"""What decoders put for bytes that are no character."""
_PARTS_WITH_OWN_KEY = frozenset({"refusal", "thinking"})
"""Types of text parts whose text is under the name of the type, not under `text`."""


@dataclass(frozen=True, slots=True)
class ArgumentDefaults:
    """The defaults that tools declare for their arguments. Some clients write them into calls they return.

    Claude Code sends `{"path": "a", "replace_all": false}` back where the model sampled `{"path": "a"}` and
    the schema of the tool declares `"default": false`. A call that states a default equals the call without.
    """

    packed: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    """For each function the properties with a default, in the encoding of `pack`, 1.0 as 1."""

    @property
    def digest(self) -> bytes:
        """16 bytes; empty if there are no defaults."""
        if not self.packed:
            return b""
        spelled = {name: {key: value.hex() for key, value in of.items()} for name, of in self.packed.items()}
        return _digest(b"defaults", pack(spelled))

    def drop(self, function: object, arguments: object) -> object:
        """The arguments of a call without those that equal a default; `arguments` itself if none does."""
        packed = self.packed.get(function) if isinstance(function, str) else None
        if not packed or not isinstance(arguments, dict):
            return arguments
        named = packed.keys() & arguments.keys()
        stated = {name for name in named if pack(arguments[name], whole_floats=False) == packed[name]}
        return {name: value for name, value in arguments.items() if name not in stated}


NO_DEFAULTS = ArgumentDefaults()


def argument_defaults(tools: Sequence[Mapping[str, Any]]) -> ArgumentDefaults:
    """The defaults of the functions in a chat request's tools. Schemas of other shapes declare none."""
    packed: dict[str, dict[str, bytes]] = {}
    for tool in tools:
        function = _object(tool.get("function"))
        properties = _object(_object(function.get("parameters")).get("properties"))
        defaults = {
            name: pack(schema["default"], whole_floats=False)
            for name, schema in properties.items()
            if isinstance(schema, Mapping) and "default" in schema
        }
        if defaults and isinstance(function.get("name"), str):
            packed[function["name"]] = defaults
    return ArgumentDefaults(packed)


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


class CanonicalMessage(msgspec.Struct, frozen=True, gc=False):
    """The digests of one message. Two messages are equal exactly if their `strict` digests are."""

    strict: bytes
    """16 bytes: digest of the whole message."""
    loose: bytes
    """16 bytes: digest of an assistant message without reasoning, its content stripped of white space at both
    ends and of U+FFFD at its end, 1.0 in arguments as 1, its calls without arguments that equal the tool's
    default. Equals `strict` if that changes nothing, and for all other roles."""
    reasoning: bytes
    """16 bytes: digest of an assistant's reasoning, stripped; empty if there is none."""
    without_arguments: bytes = b""
    """16 bytes: as `loose`, without the arguments of the tool calls; empty if there are no calls."""
    arguments: tuple[bytes, ...] = ()
    """17 bytes for each tool call: b"j" and the digest of its JSON object, 1.0 in it as 1, or b"t" and the
    digest of anything else."""

    @property
    def cut_off(self) -> bool:
        """Whether the arguments of a tool call are no JSON object."""
        return b"t" in [argument[:1] for argument in self.arguments]

    def repairs(self, recorded: tuple[bytes, ...]) -> bool | None:
        """Whether this message has objects where the recorded arguments of tool calls were none.

        Some clients, LangChain among them, complete the JSON of a cut-off call: `{"city": "Par` becomes
        `{"city": "Par"}`. Those whose format has objects only got `{}` for `null` or `[1]`.

        Args:
            recorded: `arguments` of the recorded message, which has equal `without_arguments`.

        Returns:
            True if all differing arguments were repaired so, False if no arguments differ, None if arguments
            were edited.
        """
        repaired = False
        for argument, recorded_argument in zip(self.arguments, recorded, strict=True):
            if argument == recorded_argument:
                continue
            if recorded_argument[:1] != b"t" or argument[:1] != b"j":
                return None
            repaired = True
        return repaired

    def is_copy_of(self, recorded: "CanonicalMessage") -> bool:
        """Whether a client may have sent `recorded` back as this message: stripped, or without reasoning.

        Not symmetric: a client may drop reasoning; changed or added reasoning is an edit.
        """
        return self.loose == recorded.loose and self.reasoning in (b"", recorded.reasoning)


def canonical(message: Message, index: int = 0, defaults: ArgumentDefaults = NO_DEFAULTS) -> CanonicalMessage:
    """Compute the digests of one message, in time linear in its size, at any nesting.

    Args:
        message: an OpenAI chat message, as parsed from JSON. It is not changed.
        index: the message's position in the conversation, for the error message.
        defaults: those of the conversation's tools.

    Raises:
        InvalidMessages: the message is not an object or has no role, its content is neither text nor parts, a
            tool call is not an object with a function, or a value is not JSON.
    """
    fields = _fields(message, index)
    strict = _digest(b"message", pack(fields))
    if fields["role"] != "assistant":
        return CanonicalMessage(strict, strict, b"")
    reasoning, content = _stripped(fields.get("reasoning")), _stripped(fields["content"])
    loose = strict
    if "reasoning" in fields or "tool_calls" in fields or content != fields["content"]:
        loosely = {key: value for key, value in fields.items() if key != "reasoning"} | {"content": content}
        if "tool_calls" in fields and defaults.packed:
            loosely["tool_calls"] = [_without_defaults(call, defaults) for call in fields["tool_calls"]]
        loose = _digest(b"message", pack(loosely, whole_floats=False))
    reasoning_digest = _digest(b"reasoning", pack(reasoning)) if reasoning else b""
    if "tool_calls" not in fields:
        return CanonicalMessage(strict, loose, reasoning_digest)
    calls = fields["tool_calls"]
    bare = {key: value for key, value in fields.items() if key != "reasoning"}
    bare |= {"content": content, "tool_calls": [call[:_ARGUMENTS_INDEX] for call in calls]}
    arguments = tuple(
        (b"t" if _lacks_object(call) else b"j")
        + _digest(b"arguments", pack(call[_ARGUMENTS_INDEX:], whole_floats=False))
        for call in calls
    )
    return CanonicalMessage(strict, loose, reasoning_digest, _digest(b"bare", pack(bare)), arguments)


def start(
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    model: str | None = None,
    session: str | None = None,
) -> bytes:
    """The digest of a conversation before its first message: 16 bytes.

    The order of tools and of the keys inside them counts, because templates print tools as JSON; None equals
    []. The order of template arguments does not count, the order of keys inside their values does; None
    equals {}. A missing model or session differs from one named "".

    Raises:
        InvalidMessages: tools or template arguments hold a value that is not JSON.
    """
    kwargs = sorted((template_kwargs or {}).items(), key=lambda item: str(item[0]))
    parts = [tools or [], kwargs, model, session]
    return _digest(b"start", pack(parts, sort_keys=False))


def extend(previous: bytes, message: bytes) -> bytes:
    """The digest of a conversation after one more message: 16 bytes.

    Args:
        previous: the digest of the conversation before the message, from `start` or `extend`.
        message: the `strict` or `loose` digest of the next message.
    """
    return hashlib.blake2b(previous + message, digest_size=_DIGEST_SIZE, person=b"link").digest()


def chain(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any] | None,
    model: str | None = None,
    session: str | None = None,
    loose: bool = False,
) -> list[bytes]:
    """The digests of a conversation up to and including each message, in order.

    Two conversations share a digest exactly if they are equal up to that message and in the arguments of
    `start`. A matcher that indexes recorded conversations by their last digest finds the longest recorded
    prefix of a new conversation by looking up its digests from the last to the first. A matcher that has the
    digest of a prefix continues it with `extend`.

    Args:
        loose: chain the `loose` digests. They find candidates where the strict chain finds no match; check
            each message of a candidate with `CanonicalMessage.is_copy_of`.

    Raises:
        InvalidMessages: as `canonical` and `start`.
    """
    digest = start(tools=tools, template_kwargs=template_kwargs, model=model, session=session)
    defaults = argument_defaults(tools or ()) if loose else NO_DEFAULTS
    digests = []
    for index, message in enumerate(messages):
        digests_of_message = canonical(message, index, defaults)
        digest = extend(digest, digests_of_message.loose if loose else digests_of_message.strict)
        digests.append(digest)
    return digests


def _fields(message: Message, index: int) -> dict[str, Any]:
    """The fields of a message that reach a prompt, in one spelling, as a JSON value to hash."""
    if not isinstance(message, Mapping):
        raise InvalidMessages(f"message {index} must be an object")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidMessages(f"message {index} needs a role")
    fields: dict[str, Any] = {"role": role, "content": _content(message.get("content"), index)}
    for key in ("name", "tool_call_id", "task"):
        if message.get(key) is not None:
            fields[key] = message[key]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning not in (None, ""):
        fields["reasoning"] = reasoning
    if message.get("refusal") not in (None, ""):
        fields["refusal"] = message["refusal"]
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, (list, tuple)):
        raise InvalidMessages(f"tool calls of message {index} must be a list")
    if calls:
        fields["tool_calls"] = [_call(call, index) for call in calls]
    if role == "developer" and message.get("tools"):
        # templates print these tools as JSON, so the order of keys counts
        fields["tools"] = _digest(b"tools", pack(message["tools"], sort_keys=False)).hex()
    return fields


def _content(content: object, index: int) -> str | list[Any]:
    """The text of a content; if it has parts that are not text, texts and digests of these, in order."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidMessages(f"content of message {index} must be a string or a list of parts")
    runs: list[Any] = []
    texts: list[str] = []
    for part in content:
        text_or_digest = _part(part, index)
        if isinstance(text_or_digest, str):
            texts.append(text_or_digest)
        elif text_or_digest is not None:
            runs += [*_join_texts(texts), text_or_digest]
            texts = []
    return [*runs, *_join_texts(texts)] if runs else "\n".join(texts)


def _join_texts(texts: list[str]) -> list[str]:
    return ["\n".join(texts)] if texts else []


def _part(part: object, index: int) -> str | list[str] | None:
    """The text of a text part, None if its text is null; for any other part its digest, in a list.

    The list distinguishes a digest from a text that looks like one.
    """
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidMessages(f"message {index} holds a part of type {type(part).__name__!r}")
    part = {key: value for key, value in part.items() if key != "cache_control" and value is not None}
    kind = part.get("type")  # engines refuse a text without it
    # engines read a part with a uuid by its payload, not by its type
    if not isinstance(kind, str) or kind not in TEXT_PARTS or "uuid" in part:
        return [_digest(b"part", pack(part, keep_nulls=False)).hex()]
    text = part.get(kind, part.get("text")) if kind in _PARTS_WITH_OWN_KEY else part.get("text")
    if not isinstance(text, str | None):
        raise InvalidMessages(f"a text part in message {index} holds no text")
    return text


def _call(call: object, index: int) -> list[Any]:
    """A tool call as a list: its type, then id, name and arguments, or a digest of a call of another type."""
    if not isinstance(call, Mapping):
        raise InvalidMessages(f"tool calls of message {index} must be objects with a function")
    kind, function = call.get("type"), call.get("function")
    if kind is not None and kind != "function":
        return ["other", _digest(b"call", pack(call, keep_nulls=False)).hex()]
    if not isinstance(function, Mapping):
        raise InvalidMessages(f"tool calls of message {index} must be objects with a function")
    return ["function", call.get("id"), function.get("name"), *_arguments(function.get("arguments"))]


def _without_defaults(call: list[Any], defaults: ArgumentDefaults) -> list[Any]:
    """A call of `_call` without arguments that equal the tool's default."""
    if call[_ARGUMENTS_INDEX : _ARGUMENTS_INDEX + 1] != ["json"]:
        return call
    kind, call_id, name, form, arguments = call
    return [kind, call_id, name, form, defaults.drop(name, arguments)]


def _arguments(arguments: object) -> tuple[str, object]:
    """The arguments of a tool call: "json" and a value, or "text" and a text that is not JSON."""
    if arguments is None or arguments == "":
        return "json", {}
    if not isinstance(arguments, str):
        return "json", arguments
    try:
        return "json", parse(arguments)
    except ValueError:
        return "text", arguments


def _lacks_object(call: list[Any]) -> bool:
    """Whether a function call in the form of `_call` has arguments that are no object."""
    arguments = call[_ARGUMENTS_INDEX:]
    return bool(arguments) and not isinstance(arguments[1], Mapping)


def _stripped(value: object) -> object:
    """A text without white space at its ends, and without the mark of a character that was cut at its end."""
    return value.strip().rstrip(_REPLACEMENT).rstrip() if isinstance(value, str) else value


def _digest(kind: bytes, packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=_DIGEST_SIZE, person=kind).digest()
