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

A matcher compares `strict` first. Clients also send messages back in other forms: `EQUIVALENCES` lists them,
each with the digest that ignores it. `loose` ignores *edited* reasoning as well, so check a match on `loose`
alone with `CanonicalMessage.is_copy_of`; `lenient` also ignores edited text next to calls, so check a match
on it with `echo_reason`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import msgspec

from chat_tokenizer.completed_json import completions
from chat_tokenizer.equivalences import (
    ARGUMENTS_INDEX,
    EQUIVALENCES,
    ID_INDEX,
    NO_EQUIVALENTS,
    Context,
    Equivalence,
    Equivalents,
    Fields,
    Level,
    equivalents,
    formed,
    numbered_calls,
    stripped,
)
from chat_tokenizer.errors import InvalidMessages
from chat_tokenizer.lossless_json import as_double, pack, parse, whole
from chat_tokenizer.messages import TEXT_PARTS, Message

_DIGEST_SIZE = 16
_PARTS_WITH_OWN_KEY = frozenset({"refusal", "thinking"})
"""Types of text parts whose text is under the name of the type, not under `text`."""


class CanonicalMessage(msgspec.Struct, frozen=True, gc=False):
    """The digests of one message. Two messages are equal exactly if their `strict` digests are."""

    strict: bytes
    """16 bytes: digest of the whole message."""
    loose: bytes
    """16 bytes: digest of an assistant message in the form of all equivalences up to `Level.LOOSE`. Equals
    `strict` if that changes nothing, and for all other roles."""
    reasoning: bytes
    """16 bytes: digest of an assistant's reasoning, stripped; empty if there is none."""
    without_arguments: bytes = b""
    """16 bytes: as `loose`, without the arguments of the tool calls; empty if there are no calls."""
    arguments: tuple[bytes, ...] = ()
    """For each tool call b"j" and the digest of its JSON object, 1.0 in it as 1, 17 bytes; or b"t" and the
    digest of anything else, followed by the digests of the objects that complete it."""
    lenient: bytes = b""
    """16 bytes: digest of the form up to `Level.LENIENT`; equals `loose` if that changes nothing."""
    call_ids: tuple[object, ...] = ()
    """The ids of the calls that a result after this message may answer."""

    @property
    def cut_off(self) -> bool:
        """Whether the arguments of a tool call are no JSON object."""
        return b"t" in [argument[:1] for argument in self.arguments]

    def repairs(self, recorded: tuple[bytes, ...]) -> bool | None:
        """Whether this message has objects where the recorded arguments of tool calls were none.

        Some clients, LangChain among them, complete the JSON of a cut-off call: `{"city": "Par` becomes
        `{"city": "Par"}`. Those whose format has objects only got `{}` for `null` or `[1]`. Any other object
        is an edit (`chat_tokenizer.completed_json`).

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
            starts = range(1 + _DIGEST_SIZE, len(recorded_argument), _DIGEST_SIZE)
            completed = [recorded_argument[start : start + _DIGEST_SIZE] for start in starts]
            if argument[:1] != b"j" or argument[1:] not in completed:
                return None
            repaired = True
        return repaired

    def is_copy_of(self, recorded: "CanonicalMessage") -> bool:
        """Whether a client may have sent `recorded` back as this message: stripped, or without reasoning.

        Not symmetric: a client may drop reasoning; changed or added reasoning is an edit.
        """
        return self.loose == recorded.loose and self.reasoning in (b"", recorded.reasoning)


def canonical(
    message: Message,
    index: int = 0,
    equivalents: Equivalents = NO_EQUIVALENTS,
    call_ids: tuple[object, ...] = (),
) -> CanonicalMessage:
    """Compute the digests of one message, in time linear in its size, at any nesting.

    Args:
        message: an OpenAI chat message, as parsed from JSON. It is not changed.
        index: the message's position in the conversation, for the error message.
        equivalents: those of the conversation's tools and template.
        call_ids: those of the message before it.

    Raises:
        InvalidMessages: the message is not an object or has no role, its content is neither text nor parts, a
            tool call is not an object with a function, or a value is not JSON.
    """
    context, fields = Context(equivalents, call_ids), _fields(message, index)
    if equivalents.nameless and "name" in fields:  # all that this level has; most messages have no name
        fields = formed(fields, Level.STRICT, context)
    strict = _digest(b"message", pack(fields))
    if fields["role"] != "assistant":
        numbered = numbered_calls(fields, context) if call_ids else fields
        lenient = strict if numbered is fields else _digest(b"message", pack(numbered))
        return CanonicalMessage(strict, strict, b"", lenient=lenient, call_ids=call_ids)
    reasoning, loosely = stripped(fields.get("reasoning")), formed(fields, Level.LOOSE, context)
    reasoning_digest = _digest(b"reasoning", pack(reasoning)) if reasoning else b""
    calls = fields.get("tool_calls")
    if not calls:
        loose = strict if loosely is fields else _digest(b"message", pack(loosely))
        return CanonicalMessage(strict, loose, reasoning_digest, lenient=loose, call_ids=call_ids)
    arguments = tuple(_arguments_digest(call) for call in calls)
    return CanonicalMessage(
        strict,
        _digest(b"message", pack(loosely, number=whole)),
        reasoning_digest,
        _digest(b"bare", pack(formed(loosely, Level.BARE, context))),
        arguments,
        _digest(b"message", pack(formed(loosely, Level.LENIENT, context), number=as_double)),
        _ids_of(fields),
    )


def echo_reason(
    sent: Sequence[Message], recorded: Sequence[Message], equivalents: Equivalents = NO_EQUIVALENTS
) -> str | None:
    """Why messages that a client sent are recognised as those that were recorded.

    Returns:
        the reason of the fewest equivalences that explain all differences, that of the last of them in
        `EQUIVALENCES`; empty if all have none, None if the client edited a message.

    Raises:
        InvalidMessages: as `canonical`.
    """
    if len(sent) != len(recorded):
        return None
    reasons = {""}
    ours, theirs = Context(equivalents), Context(equivalents)
    for message, original in zip(sent, recorded, strict=True):
        explained = _explained(_fields(message, 0), ours, _fields(original, 0), theirs)
        if explained is None:
            return None
        reasons.update(each.reason for each in explained[-1:])
        ours, theirs = _after(message, ours), _after(original, theirs)
    return max(reasons, key=[each.reason for each in EQUIVALENCES].index)


def _explained(
    sent: Fields, ours: Context, recorded: Fields, theirs: Context
) -> tuple[Equivalence, ...] | None:
    """The fewest equivalences with a reason that explain the differences of a message; None for an edit."""
    reasoning = stripped(sent.get("reasoning"))
    if reasoning and reasoning != stripped(recorded.get("reasoning")):
        return None
    lenient = [each for each in EQUIVALENCES if each.level is Level.LENIENT]
    for tried in (each for count in range(len(lenient) + 1) for each in combinations(lenient, count)):
        two_way = [each for each in tried if not each.one_way]
        if _digest_in(two_way, sent, ours) == _digest_in(tried, recorded, theirs):
            return tried
    return None


def _digest_in(lenient: Sequence[Equivalence], fields: Fields, context: Context) -> bytes:
    """The digest of a message in the forms of some equivalences, and of all that have no reason."""
    fields, number = formed(fields, Level.STRICT, context), None
    if fields["role"] == "assistant":
        fields = formed(fields, Level.LOOSE, context)
        number = next((each.number for each in lenient if each.number), whole)
    for each in lenient:
        fields = each.form(fields, context) if each.form else fields
    return _digest(b"message", pack(fields, number=number))


def _after(message: Message, context: Context) -> Context:
    """The context of the next message."""
    return Context(context.equivalents, _ids_of(_fields(message, 0)) or context.call_ids)


def _ids_of(fields: Fields) -> tuple[object, ...]:
    """The ids of the tool calls."""
    return tuple(call[ID_INDEX] for call in fields.get("tool_calls", ()) if call[0] == "function")


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
    equal = equivalents(tools or ()) if loose else NO_EQUIVALENTS
    digests = []
    for index, message in enumerate(messages):
        digests_of_message = canonical(message, index, equal)
        digest = extend(digest, digests_of_message.loose if loose else digests_of_message.strict)
        digests.append(digest)
    return digests


def _fields(message: Message, index: int) -> Fields:
    """See `Fields`."""
    if not isinstance(message, Mapping):
        raise InvalidMessages(f"message {index} must be an object")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidMessages(f"message {index} needs a role")
    fields: Fields = {"role": role, "content": _content(message.get("content"), index)}
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


def _arguments_digest(call: list[Any]) -> bytes:
    """See `CanonicalMessage.arguments`."""

    def digest(*form: object) -> bytes:
        return _digest(b"arguments", pack(list(form), number=whole))

    form = call[ARGUMENTS_INDEX:]
    if not _lacks_object(call):
        return b"j" + digest(*form)
    return b"t" + digest(*form) + b"".join(digest("json", each) for each in completions(form[1]))


def _lacks_object(call: list[Any]) -> bool:
    """Whether a function call in the form of `_call` has arguments that are no object."""
    arguments = call[ARGUMENTS_INDEX:]
    return bool(arguments) and not isinstance(arguments[1], Mapping)


def _digest(kind: bytes, packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=_DIGEST_SIZE, person=kind).digest()
