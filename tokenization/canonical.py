"""Which messages are the same message: digests that do not depend on how a client spells them.

Laws, for messages `a` and `b`:

    canonical(a).strict == canonical(b).strict      exactly when they differ in spelling alone
    strict equal  =>  loose equal                   but not the other way round
    chain(messages[:n], ...) == chain(messages, ...)[:n]

Spelling is what clients and JSON libraries change without meaning to:

- content "" = null = missing = []; text parts = the string they make, joined by line feeds as engines join
  them (so one part = its string); a cache mark (`cache_control`) on a part is no content;
- tool-call arguments as JSON text = the same JSON with other white space, escapes and key order = the object;
  "" = null = missing = {};
- `reasoning_content` = `reasoning`, which wins where both are given; "" = null = missing, also of `refusal`;
- `tool_calls` [] = null = missing; the `type` of a call is "function" unless it says otherwise;
- null = missing for every other field; fields that reach no prompt are not looked at, neither in the message
  nor in its text parts and tool calls.

Everything else tells messages apart: white space in text, the role (developer is not system), the order of
tool calls and their ids, 1 and 1.0 (they print differently), true and 1, unicode normal forms, images, audio
and every other part that is not text. When in doubt messages differ: a missed match costs a rendering that is
reported, a wrong one would put another conversation's tokens into a prompt.

Arguments that are not JSON compare as the text they are. So do those that a parser would lose something of,
or accept only sometimes: repeated keys, NaN, Infinity, numbers beyond a float, integers of more digits than
Python reads, and nesting deeper than `MAX_DEPTH`.

Which digest a matcher uses when: `strict` first. A client that sends an assistant's turn back may have
dropped its reasoning and stripped its content; `loose` forgives both. It also forgives *edited* reasoning, so
a match on `loose` alone is a candidate, which `CanonicalMessage.is_copy_of` accepts or refuses.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenization.errors import InvalidMessages
from tokenization.messages import TEXT_PARTS, Message

MAX_DEPTH = 100
"""JSON text nested deeper compares as text: a parser's own limit moves with the stack it is called on."""

_DIGEST_SIZE = 16
_ARGUMENTS_AT = 3
"""Where the arguments stand in what `_call` makes of a function call."""
_OWN_KEY_PARTS = frozenset({"refusal", "thinking"})
# the closing quote is optional so that a text full of unclosed strings is still read in one pass
_TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[][{}]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class CanonicalMessage:
    """One message without its spelling. Two are equal exactly when their `strict` digests are."""

    strict: bytes
    """16 bytes for everything that counts."""
    loose: bytes
    """16 bytes. Of an assistant's message: without its reasoning, and its text stripped of white space at
    both ends. The same as `strict` if that changes nothing, and for every other role."""
    reasoning: bytes
    """16 bytes for an assistant's reasoning, stripped; empty if there is none."""
    without_arguments: bytes = b""
    """16 bytes: `loose` of the same message with no arguments in its tool calls; empty if it has no calls."""
    arguments: tuple[bytes, ...] = ()
    """For each tool call 17 bytes: b"j" and a digest of its JSON, or b"t" and a digest of other text."""

    def repairs(self, recorded: tuple[bytes, ...]) -> bool | None:
        """Whether this message completes tool calls whose recorded arguments are no JSON.

        Clients complete a call that was cut off (LangChain does), so its arguments become JSON.

        Args:
            recorded: `arguments` of the recorded message, which has equal `without_arguments`.

        Returns:
            True if it does, False if all arguments are equal, None if arguments differ otherwise: an edit.
        """
        repaired = False
        for ours, theirs in zip(self.arguments, recorded, strict=True):
            if ours == theirs:
                continue
            if theirs[:1] != b"t" or ours[:1] != b"j":
                return None
            repaired = True
        return repaired

    def is_copy_of(self, recorded: "CanonicalMessage") -> bool:
        """Whether this is `recorded` as a client sends it back: whole, stripped, or without its reasoning.

        Not symmetric: reasoning may get lost on the way, but reasoning that differs, or that the recorded
        message never had, is an edit.
        """
        return self.loose == recorded.loose and self.reasoning in (b"", recorded.reasoning)


def canonical(message: Message, index: int = 0) -> CanonicalMessage:
    """The digests of one message. The cost is linear in its size, at any nesting.

    Args:
        message: an OpenAI chat message, as parsed from JSON. It is left as it is.
        index: its place in the conversation, for the error's text.

    Raises:
        InvalidMessages: it is no object, has no role, its content is neither text nor parts, a tool call is
            no object with a function, or a value is none that JSON has.
    """
    fields = _fields(message, index)
    strict = _digest(b"message", _pack(fields))
    if fields["role"] != "assistant":
        return CanonicalMessage(strict, strict, b"")
    reasoning, content = _stripped(fields.get("reasoning")), _stripped(fields["content"])
    loose = strict
    if "reasoning" in fields or content != fields["content"]:
        kept = {key: value for key, value in fields.items() if key != "reasoning"}
        loose = _digest(b"message", _pack({**kept, "content": content}))
    reasoning_digest = _digest(b"reasoning", _pack(reasoning)) if reasoning else b""
    if "tool_calls" not in fields:
        return CanonicalMessage(strict, loose, reasoning_digest)
    calls = fields["tool_calls"]
    bare = {key: value for key, value in fields.items() if key != "reasoning"}
    bare |= {"content": content, "tool_calls": [call[:_ARGUMENTS_AT] for call in calls]}
    arguments = tuple(
        (b"t" if call[_ARGUMENTS_AT : _ARGUMENTS_AT + 1] == ["text"] else b"j")
        + _digest(b"arguments", _pack(call[_ARGUMENTS_AT:]))
        for call in calls
    )
    return CanonicalMessage(strict, loose, reasoning_digest, _digest(b"bare", _pack(bare)), arguments)


def start(
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    model: str | None = None,
    session: str | None = None,
) -> bytes:
    """The digest of a conversation before its first message: 16 bytes.

    Tools count with their order and the order of keys inside them, because templates print them as JSON; none
    is the same as []. The order of template arguments does not count, that inside their values does; none
    is the same as {}. A missing model or session is not the same as one named "".

    Raises:
        InvalidMessages: tools or template arguments hold what JSON has not.
    """
    kwargs = sorted((template_kwargs or {}).items(), key=lambda item: str(item[0]))
    parts = [tools or [], kwargs, model, session]
    return _digest(b"start", _pack(parts, sort_keys=False))


def extend(previous: bytes, message: bytes) -> bytes:
    """The digest of a conversation with one message more: 16 bytes.

    Args:
        previous: the digest so far, from `start` or `extend`.
        message: the `strict` or `loose` digest of the next message.
    """
    return _digest(b"link", previous + message)


def chain(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any] | None,
    model: str | None = None,
    session: str | None = None,
    loose: bool = False,
) -> list[bytes]:
    """The digest of the conversation up to and including each message, in order.

    Two conversations share a digest exactly when they agree on everything up to that message and on what
    `start` takes. A matcher that files each recorded conversation under its last digest finds the longest
    recorded prefix of a new one by looking its digests up from the back; one that holds the digest of the
    prefix already goes on with `extend`.

    Args:
        loose: chain the `loose` digests. Looked up where the strict chain ends early; conversations found
            this way are candidates, to be checked message by message with `CanonicalMessage.is_copy_of`.

    Raises:
        InvalidMessages: as `canonical` and `start`.
    """
    digest = start(tools=tools, template_kwargs=template_kwargs, model=model, session=session)
    digests = []
    for index, message in enumerate(messages):
        made = canonical(message, index)
        digest = extend(digest, made.loose if loose else made.strict)
        digests.append(digest)
    return digests


def _fields(message: Message, index: int) -> dict[str, Any]:
    """What counts of a message, in one spelling: a JSON value whose encoding is hashed."""
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
    if not isinstance(calls, list | tuple | None):
        raise InvalidMessages(f"tool calls of message {index} must be a list")
    if calls:
        fields["tool_calls"] = [_call(call, index) for call in calls]
    if role == "developer" and message.get("tools"):
        fields["tools"] = _digest(b"tools", _pack(message["tools"], sort_keys=False)).hex()
    return fields


def _content(content: object, index: int) -> str | list[Any]:
    """The text of a content; if it has other parts too, runs of text and digests of those, in order."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidMessages(f"content of message {index} must be a string or a list of parts")
    runs: list[Any] = []
    texts: list[str] = []
    for part in content:
        found = _part(part, index)
        if isinstance(found, str):
            texts.append(found)
        elif found is not None:
            runs += [*_joined(texts), found]
            texts = []
    return [*runs, *_joined(texts)] if runs else "\n".join(texts)


def _joined(texts: list[str]) -> list[str]:
    return ["\n".join(texts)] if texts else []


def _part(part: object, index: int) -> str | list[str] | None:
    """The text of a text part, None for one without any; of any other part its digest, in a list."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidMessages(f"message {index} holds a part of type {type(part).__name__!r}")
    part = {key: value for key, value in part.items() if key != "cache_control" and value is not None}
    kind = part.get("type", "text" if part.keys() == {"text"} else None)
    # engines take a part with a uuid by its payload, whatever its type
    if not isinstance(kind, str) or kind not in TEXT_PARTS or "uuid" in part:
        return [_digest(b"part", _pack(part, keep_nulls=False)).hex()]
    text = part.get(kind, part.get("text")) if kind in _OWN_KEY_PARTS else part.get("text")
    if not isinstance(text, str | None):
        raise InvalidMessages(f"a text part in message {index} holds no text")
    return text


def _call(call: object, index: int) -> list[Any]:
    if not isinstance(call, Mapping):
        raise InvalidMessages(f"tool calls of message {index} must be objects with a function")
    kind, function = call.get("type"), call.get("function")
    if kind is not None and kind != "function":
        return ["other", _digest(b"call", _pack(call, keep_nulls=False)).hex()]
    if not isinstance(function, Mapping):
        raise InvalidMessages(f"tool calls of message {index} must be objects with a function")
    return ["function", call.get("id"), function.get("name"), *_arguments(function.get("arguments"))]


def _arguments(arguments: object) -> tuple[str, object]:
    """A value with the word that says whether it is JSON or text that is none."""
    if arguments is None or arguments == "":
        return "json", {}
    if not isinstance(arguments, str):
        return "json", arguments
    try:
        return "json", _parse(arguments)
    except ValueError:
        return "text", arguments


def _parse(text: str) -> object:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, nested too deep, or not told apart by its value.
    """
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise ValueError("nested too deep")
    return _DECODER.decode(text)


def _depth(text: str) -> int:
    depth = deepest = 0
    for token in _TOKENS.findall(text):
        if token in ("[", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif token in ("]", "}"):
            depth -= 1
    return deepest


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key is repeated")
    return made


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("not a finite number")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_finite, parse_constant=_finite)


def _stripped(value: object) -> object:
    return value.strip() if isinstance(value, str) else value


def _pack(value: object, *, sort_keys: bool = True, keep_nulls: bool = True) -> bytes:
    """A JSON value as bytes: different values never give the same bytes.

    Every item begins with its type and, where it can vary, its length or its number of members; no text can
    imitate structure. Works through a list of its own instead of recursing, so no nesting is too deep.

    Raises:
        InvalidMessages: the value holds something that JSON has not.
    """
    out: list[bytes] = []
    todo: list[object] = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            raw = item.encode("utf-8", "surrogatepass")
            out += b"s%d:" % len(raw), raw
        elif isinstance(item, list | tuple):
            out.append(b"a%d:" % len(item))
            todo += reversed(item)
        elif isinstance(item, dict | Mapping):  # named first, dict spares the slow check of an abstract class
            keys = list(item) if keep_nulls else [key for key in item if item[key] is not None]
            if not all(isinstance(key, str) for key in keys):
                raise InvalidMessages("the names in an object must be strings")
            if sort_keys:
                keys.sort()
            out.append(b"o%d:" % len(keys))
            for key in reversed(keys):
                todo += item[key], key
        else:
            out.append(_pack_scalar(item))
    return b"".join(out)


def _pack_scalar(item: object) -> bytes:
    if item is None:
        return b"n"
    if isinstance(item, bool):
        return b"t" if item else b"f"
    if isinstance(item, int):
        return b"i%x;" % item  # the decimal form of a long integer is refused by Python
    if isinstance(item, float):
        return b"d%b;" % float.__repr__(item).encode()
    raise InvalidMessages(f"a value of type {type(item).__name__!r} is not JSON")


def _digest(kind: bytes, packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=_DIGEST_SIZE, person=kind).digest()
