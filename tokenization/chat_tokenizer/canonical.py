"""Digests that recognise a message in every spelling of it that clients send.

Laws, for messages `a` and `b`:

    canonical(a).strict == canonical(b).strict      exactly if `a` and `b` differ in spelling only
    strict equal  =>  loose equal                   but not the other way round
    chain(messages[:n], ...) == chain(messages, ...)[:n]

Spelling is what clients and JSON libraries change unintentionally:

- content: "" = null = missing = [] in assistant messages; null = missing = [] in others. One text part = its
  string. Several = their texts joined by line feeds, where the engine joins them. `cache_control` of a part
  is ignored unless a rendering prints it.
- arguments of a tool call: a JSON text = the same JSON with other white space, escapes or key order = the
  object. "" = null = missing = {}.
- reasoning: `reasoning_content` = `reasoning`, which takes precedence. "" = null = missing.
- `refusal`: "" = null = missing.
- `tool_calls`: [] = null = missing. A missing `type` of a call = "function".
- every other field of the API: null = missing. Fields that reach no template are ignored, and so are those
  of text parts and tool calls that no rendering of this template prints.

Everything else distinguishes messages: white space in text, the role (developer is not system), the order of
tool calls and their ids, 1 and 1.0 (they print differently), true and 1, Unicode normal forms, images, audio
and every other part that is not text. In doubt, messages differ: a missed match costs a rendering, which is
reported; a false match would put the tokens of another conversation into a prompt.

Arguments compare as plain text if they are not JSON, or if parsing them loses information or fails in some
parsers: repeated keys, NaN, Infinity, numbers beyond the range of a float, integers with more digits than
Python parses, and nesting deeper than `lossless_json.MAX_DEPTH`.

A matcher compares `strict` first. Clients also send messages back in other forms: `EQUIVALENCES` lists them,
each with the digest that ignores it. `loose` ignores *edited* reasoning and *added* white space as well, so
check a match on `loose` alone with `CanonicalMessage.is_copy_of` or `dropped`; `lenient` also ignores edited
text next to calls, so check a match on it with `echo_reason`.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import msgspec

from chat_tokenizer.completed_json import completions
from chat_tokenizer.equivalences import (
    ARGUMENTS_INDEX,
    EQUIVALENCES,
    ID_INDEX,
    MORE_INDEX,
    NO_EQUIVALENTS,
    REPLACEMENT,
    Context,
    Equivalence,
    Equivalents,
    Fields,
    Level,
    alone,
    equivalents,
    formed,
    numbered_calls,
    stripped,
)
from chat_tokenizer.errors import InvalidMessages
from chat_tokenizer.lossless_json import as_double, pack, parse, whole
from chat_tokenizer.messages import CALL_FIELDS, FUNCTION_FIELDS, PART_FIELDS, TEXT_PARTS, Message

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
    ends: bytes = b""
    """Of an assistant's text: 1 byte, whether it ends with U+FFFD, and 16 bytes, the digest of white space at
    its ends, if there is any. Empty if `loose` ignores nothing there."""

    @property
    def ignored(self) -> bytes:
        """What `loose` ignores and `dropped` compares: `reasoning`, and `ends` after it."""
        return self.reasoning.ljust(_DIGEST_SIZE, b"\0") + self.ends if self.ends else self.reasoning

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
        """Whether a client may have sent `recorded` back as this message; see `dropped`."""
        return self.loose == recorded.loose and dropped(self.ignored, recorded.ignored) is not None


def dropped(sent: bytes, recorded: bytes) -> str | None:
    """The reason why a client may have sent a message back without what it had at its ends.

    Not symmetric: a client may drop reasoning and white space. What is changed or added is an edit, but for
    U+FFFD: engines show nothing for the first bytes of a character that was not sampled to its end.

    Args:
        sent: `CanonicalMessage.ignored` of a message with an equal `loose` digest.
        recorded: that of the recorded message.

    Returns:
        the reason in `EQUIVALENCES`; empty for dropped reasoning, and if nothing differs; None for an edit.
    """
    reasoning, end, white_space = _split(sent)
    recorded_reasoning, recorded_end, recorded_white_space = _split(recorded)
    if reasoning not in (b"", recorded_reasoning) or white_space not in (b"", recorded_white_space):
        return None
    if end < recorded_end:
        return None
    if white_space != recorded_white_space:
        return "text_stripped"
    return "character_cut" if end > recorded_end else ""


def _split(ignored: bytes) -> tuple[bytes, bool, bytes]:
    """Reasoning, whether the text ends with U+FFFD, and white space, of `CanonicalMessage.ignored`."""
    reasoning, ends = ignored[:_DIGEST_SIZE], ignored[_DIGEST_SIZE:]
    return reasoning if any(reasoning) else b"", ends[:1] == b"\1", ends[1:]


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
    fields = formed(fields, Level.STRICT, context)
    strict = _digest(b"message", pack(fields))
    if fields["role"] != "assistant":
        numbered = numbered_calls(fields, context) if call_ids else fields
        lenient = strict if numbered is fields else _digest(b"message", pack(numbered))
        return CanonicalMessage(strict, strict, b"", lenient=lenient, call_ids=call_ids)
    reasoning, loosely = stripped(fields.get("reasoning")), formed(fields, Level.LOOSE, context)
    reasoning_digest = _digest(b"reasoning", pack(reasoning)) if reasoning else b""
    calls, ends = fields.get("tool_calls"), _ends(fields["content"])
    if not calls:
        loose = strict if loosely is fields else _digest(b"message", pack(loosely))
        return CanonicalMessage(strict, loose, reasoning_digest, lenient=loose, call_ids=call_ids, ends=ends)
    arguments = tuple(_arguments_digest(call) for call in calls)
    return CanonicalMessage(
        strict,
        _digest(b"message", pack(loosely, number=whole)),
        reasoning_digest,
        _digest(b"bare", pack(formed(loosely, Level.BARE, context))),
        arguments,
        _digest(b"message", pack(formed(loosely, Level.LENIENT, context), number=as_double)),
        _ids_of(fields),
        ends,
    )


def echo_reason(
    sent: Sequence[Message],
    recorded: Sequence[Message],
    equivalents: Equivalents = NO_EQUIVALENTS,
    ids: Iterable[object] = (),
) -> str | None:
    """Why messages that a client sent are recognised as those that were recorded.

    Args:
        ids: the ids of calls in earlier messages, which are equal.

    Returns:
        the reason of the fewest equivalences that explain all differences, that of the last of them in
        `EQUIVALENCES`; empty if all have none, None if the client edited a message.

    Raises:
        InvalidMessages: as `canonical`.
    """
    if len(sent) != len(recorded):
        return None
    reasons, renamed = {""}, {(pack(each), pack(each)) for each in ids}
    ours, theirs = Context(equivalents), Context(equivalents)
    for message, original in zip(sent, recorded, strict=True):
        own, before = canonical(message, 0, equivalents), canonical(original, 0, equivalents)
        explained = _explained(_fields(message, 0), ours, _fields(original, 0), theirs)
        loosely = dropped(own.ignored, before.ignored)
        if explained is None or loosely is None:
            return None
        reasons.update([loosely], [each.reason for each in explained[-1:]])
        ours = Context(equivalents, own.call_ids or ours.call_ids)
        theirs = Context(equivalents, before.call_ids or theirs.call_ids)
        pairs = zip(own.call_ids, before.call_ids, strict=False)
        renamed.update((pack(new), pack(old)) for new, old in pairs)
    if any(len(set(side)) < len(renamed) for side in zip(*renamed, strict=True)):
        return None  # two ids became one, or one two
    return max(reasons, key=[each.reason for each in EQUIVALENCES].index)


def _explained(
    sent: Fields, ours: Context, recorded: Fields, theirs: Context
) -> tuple[Equivalence, ...] | None:
    """The fewest equivalences with a reason that explain the differences of a message; None for an edit."""
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
    fields: Fields = {"role": role, "content": _content(message.get("content"), role, index)}
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


def _ends(content: object) -> bytes:
    """See `CanonicalMessage.ends`."""
    text = stripped(content)
    if text == content or not isinstance(text, str) or not isinstance(content, str):
        return b""
    start, _, end = content.partition(text) if text else (content, "", "")
    cut = content.rstrip(REPLACEMENT)
    if cut != content:
        start, end = (start, end.rstrip(REPLACEMENT)) if text else (cut, "")
    white_space = _digest(b"ends", pack([start, end])) if start or end else b""
    return bytes([cut != content]) + white_space


def _content(content: object, role: str, index: int) -> str | list[Any]:
    """The text of a content; if it has more than one text, the list of what `_part` makes of its parts."""
    if isinstance(content, str):
        return content
    nothing: str | list[Any] = "" if role == "assistant" else []
    if content is None:
        return nothing
    if not isinstance(content, list | tuple):
        raise InvalidMessages(f"content of message {index} must be a string or a list of parts")
    parts: list[Any] = [each for part in content if (each := _part(part, index)) is not None]
    return alone(parts) if parts else nothing


def _part(part: object, index: int) -> str | dict[str, Any] | list[str] | None:
    """The text of a text part, None if its text is null; for any other part its digest, in a list.

    The list distinguishes a digest from a text that looks like one. A text part is an object if it has fields
    that vLLM does not read, but passes to the template.
    """
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidMessages(f"message {index} holds a part of type {type(part).__name__!r}")
    more = {key: value for key, value in part.items() if key not in PART_FIELDS}
    part = {key: value for key, value in part.items() if key != "cache_control" and value is not None}
    kind = part.get("type")  # engines refuse a text without it
    # engines read a part with a uuid by its payload, not by its type
    if not isinstance(kind, str) or kind not in TEXT_PARTS or "uuid" in part:
        return [_digest(b"part", pack(part, keep_nulls=False)).hex()]
    text = part.get(kind, part.get("text")) if kind in _PARTS_WITH_OWN_KEY else part.get("text")
    if not isinstance(text, str | None):
        raise InvalidMessages(f"a text part in message {index} holds no text")
    return {"text": text, "more": more} if more and text is not None else text


def _call(call: object, index: int) -> list[Any]:
    """A tool call as a list: its type, then id, name and arguments, or a digest of a call of another type.

    Last come fields of call and function that the API does not have, which vLLM passes to the template.
    """
    if not isinstance(call, Mapping):
        raise InvalidMessages(f"tool calls of message {index} must be objects with a function")
    kind, function = call.get("type"), call.get("function")
    if kind is not None and kind != "function":
        return ["other", _digest(b"call", pack(call, keep_nulls=False)).hex()]
    if not isinstance(function, Mapping):
        raise InvalidMessages(f"tool calls of message {index} must be objects with a function")
    own = ((call, CALL_FIELDS), (function, FUNCTION_FIELDS))
    more = [{key: of[key] for key in of if key not in api} for of, api in own]
    arguments = _arguments(function.get("arguments"))
    return ["function", call.get("id"), function.get("name"), *arguments, *(more if any(more) else ())]


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

    form = call[ARGUMENTS_INDEX:MORE_INDEX]
    if not _lacks_object(call):
        return b"j" + digest(*form)
    return b"t" + digest(*form) + b"".join(digest("json", each) for each in completions(form[1]))


def _lacks_object(call: list[Any]) -> bool:
    """Whether a function call in the form of `_call` has arguments that are no object."""
    arguments = call[ARGUMENTS_INDEX:]
    return bool(arguments) and not isinstance(arguments[1], Mapping)


def _digest(kind: bytes, packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=_DIGEST_SIZE, person=kind).digest()
