"""The forms in which clients send back what was sampled, as a table: see `EQUIVALENCES`.

Each row maps the fields of a message to a form that all messages have that differ in one way only.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import groupby
from typing import Any, NamedTuple

from chat_tokenizer.lossless_json import as_double, pack, whole

ID_INDEX, ARGUMENTS_INDEX, MORE_INDEX = 1, 3, 5
"""Indexes of id, arguments (two items) and further fields, if any, in the list of a function call."""
CALL, PART = "call", "part"
"""In `Unprinted.fields`."""
REPLACEMENT = "\ufffd"
"""What decoders put for bytes that are no character."""
_PLACEHOLDERS = frozenset({"(no content)"})
"""Texts that clients put where a message has none."""

Fields = dict[str, Any]
"""The fields of a message that reach a prompt, in one spelling, as a JSON value to hash."""


@dataclass(frozen=True, slots=True)
class Unprinted:
    """What of messages no rendering of a template prints, and how texts reach it: see `unprinted.py`."""

    names: frozenset[str] = frozenset()
    """The roles of messages whose `name` is not printed."""
    fields: frozenset[str] = frozenset()
    """`CALL`, `PART`, if further fields of calls and functions, or of text parts, are not printed."""
    printed: frozenset[tuple[str, str]] = frozenset()
    """Exceptions from `fields`, each with its kind."""
    content_format: str | None = None
    """"string": the engine joins text parts; "openai": only in results of tools; None: not known."""

    def without(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Those of the further fields of a call, a function or a text part that may be printed."""
        if kind in self.fields:
            return {name: value for name, value in fields.items() if (kind, name) in self.printed}
        # it is for servers; where the engine renders, nothing tells whether it prints any field
        server = kind == PART and self.content_format != "openai"
        return _without(fields, "cache_control") if server else fields


@dataclass(frozen=True, slots=True)
class Equivalents:
    """What the tools and the template of a conversation make equal.

    Claude Code sends `{"path": "a", "replace_all": false}` back where the model sampled `{"path": "a"}` and
    the schema of the tool declares `"default": false`. A call that states a default equals the call without.
    Frameworks put the name of an agent into its messages: where no rendering prints it, they are equal too.
    """

    packed: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    """For each function the properties with a default, in the encoding of `pack`, 1.0 as 1."""
    unprinted: Unprinted = field(default_factory=Unprinted)

    @property
    def digest(self) -> bytes:
        """16 bytes; empty if nothing is equal."""
        if self == NO_EQUIVALENTS:
            return b""
        spelled = {name: {key: value.hex() for key, value in of.items()} for name, of in self.packed.items()}
        of = self.unprinted
        sets = [sorted(of.names), sorted(of.fields), sorted(of.printed)]
        packed = pack([spelled, *sets, of.content_format])
        return hashlib.blake2b(packed, digest_size=16, person=b"equivalents").digest()

    def drop(self, function: object, arguments: object) -> object:
        """The arguments of a call without those that equal a default; `arguments` itself if none does."""
        packed = self.packed.get(function) if isinstance(function, str) else None
        if not packed or not isinstance(arguments, dict):
            return arguments
        named = packed.keys() & arguments.keys()
        stated = {name for name in named if pack(arguments[name], number=whole) == packed[name]}
        return {name: value for name, value in arguments.items() if name not in stated}


NO_EQUIVALENTS = Equivalents()


def equivalents(
    tools: Sequence[Mapping[str, Any]],
    unprinted: Unprinted | None = None,
) -> Equivalents:
    """`Equivalents` with the defaults of the functions in a chat request's tools.

    Schemas of other shapes declare no defaults.
    """
    packed: dict[str, dict[str, bytes]] = {}
    for tool in tools:
        function = _object(tool.get("function"))
        properties = _object(_object(function.get("parameters")).get("properties"))
        defaults = {
            name: pack(schema["default"], number=whole)
            for name, schema in properties.items()
            if isinstance(schema, Mapping) and "default" in schema
        }
        if defaults and isinstance(function.get("name"), str):
            packed[function["name"]] = defaults
    return Equivalents(packed, unprinted or Unprinted())


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


class Level(IntEnum):
    """The digest that ignores a difference."""

    STRICT = 0
    """All digests: the rendering is the same."""
    LOOSE = 1
    """`loose`, `lenient` and `without_arguments`: the recorded ids are used without a word."""
    LENIENT = 2
    """`lenient`: they are used if only one recorded turn can be meant, with a reason."""
    BARE = 3
    """`without_arguments`: they are used if the recorded arguments were cut off, with a reason."""


class Context(NamedTuple):
    """What the form of a message depends on besides the message."""

    equivalents: Equivalents
    call_ids: tuple[object, ...] = ()
    """The ids of the calls that a result may answer: those of the last message with calls."""


class Equivalence(NamedTuple):
    """A difference between a recorded message and what a client sends back for it that is no edit."""

    name: str
    level: Level
    form: Callable[[Fields, Context], Fields] | None = None
    """Maps all messages that differ in this way to one; the fields themselves if it changes nothing."""
    number: Callable[[float], float] | None = None
    """The same for each number in them."""
    reason: str = ""
    """The word for a client whose request is recognised by it; empty if none is told. For those of the level
    `LOOSE`, `canonical.dropped` finds it."""
    one_way: bool = False
    """Whether a client may only send the form of what was recorded, never something else with that form."""


def _without_name(fields: Fields, context: Context) -> Fields:
    return _without(fields, "name") if fields["role"] in context.equivalents.unprinted.names else fields


def _with_joined_texts(fields: Fields, context: Context) -> Fields:
    """Texts as vLLM joins them before the template gets them."""
    content, form = fields["content"], context.equivalents.unprinted.content_format
    if not isinstance(content, list) or (form != "string" and (form is None or fields["role"] != "tool")):
        return fields
    plain = [each["text"] if isinstance(each, dict) else each for each in content]
    if form == "string":
        runs = groupby(filter(None, plain), lambda each: isinstance(each, str))
        plain = [each for text, run in runs for each in (["\n".join(run)] if text else run)]
    elif all(isinstance(each, str) for each in plain):
        plain = ["\n".join(plain)]
    return {**fields, "content": alone(plain) or ""}


def alone(parts: list[Any]) -> str | list[Any]:
    """The text of the only part; else the parts."""
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts


def _without_unprinted_fields(fields: Fields, context: Context) -> Fields:
    content, calls = fields["content"], fields.get("tool_calls", ())
    unprinted = context.equivalents.unprinted
    if isinstance(content, list):
        fields = {**fields, "content": alone([_printed_part(each, unprinted) for each in content])}
    if any(len(call) > MORE_INDEX for call in calls):
        fields = {**fields, "tool_calls": [_printed_call(call, unprinted) for call in calls]}
    return fields


def _printed_part(part: Any, unprinted: Unprinted) -> Any:
    more = unprinted.without(PART, part["more"]) if isinstance(part, dict) else None
    return part if more is None else {**part, "more": more} if more else part["text"]


def _printed_call(call: list[Any], unprinted: Unprinted) -> list[Any]:
    more = [unprinted.without(CALL, each) for each in call[MORE_INDEX:]]
    return [*call[:MORE_INDEX], *(more if any(more) else ())]


def _without_reasoning(fields: Fields, context: Context) -> Fields:
    return _without(fields, "reasoning")


def _without(fields: Fields, name: str) -> Fields:
    return {key: value for key, value in fields.items() if key != name} if name in fields else fields


def _without_white_space(fields: Fields, context: Context) -> Fields:
    content = stripped(fields["content"])
    return fields if content == fields["content"] else {**fields, "content": content}


def _without_defaults(fields: Fields, context: Context) -> Fields:
    if "tool_calls" not in fields or not context.equivalents.packed:
        return fields
    calls = [_call_without_defaults(call, context.equivalents) for call in fields["tool_calls"]]
    return {**fields, "tool_calls": calls}


def numbered_calls(fields: Fields, context: Context) -> Fields:
    """The position of a call in its message in place of its id, in the call and in its result."""
    called = fields.get("tool_call_id")
    if called is not None and called in context.call_ids:
        return {**fields, "tool_call_id": context.call_ids.index(called)}
    if "tool_calls" not in fields:
        return fields
    calls = enumerate(fields["tool_calls"])
    first: dict[bytes, int] = {}  # two ids that became one differ from two
    numbered = [
        [call[0], first.setdefault(pack(call[ID_INDEX]), index), *call[ID_INDEX + 1 :]]
        if len(call) > 2
        else call
        for index, call in calls
    ]
    return {**fields, "tool_calls": numbered}


def _without_text(fields: Fields, context: Context) -> Fields:
    if "tool_calls" not in fields or not isinstance(fields["content"], str):
        return fields
    return {**fields, "content": ""}


def _without_placeholder(fields: Fields, context: Context) -> Fields:
    return _without_text(fields, context) if str(fields["content"]) in _PLACEHOLDERS else fields


def _without_arguments(fields: Fields, context: Context) -> Fields:
    calls = [[*call[:ARGUMENTS_INDEX], *call[MORE_INDEX:]] for call in fields["tool_calls"]]
    return {**fields, "tool_calls": calls}


def _call_without_defaults(call: list[Any], equivalents: Equivalents) -> list[Any]:
    """A call of `_call` without arguments that equal the tool's default."""
    if call[ARGUMENTS_INDEX : ARGUMENTS_INDEX + 1] != ["json"]:
        return call
    kind, call_id, name, form, arguments, *more = call
    return [kind, call_id, name, form, equivalents.drop(name, arguments), *more]


def stripped(value: object) -> object:
    """A text without white space at its ends, and without the mark of a character that was cut at its end."""
    return value.strip().rstrip(REPLACEMENT).rstrip() if isinstance(value, str) else value


EQUIVALENCES = (
    Equivalence("a name that no rendering prints", Level.STRICT, _without_name),
    Equivalence("parts whose texts the engine joins", Level.STRICT, _with_joined_texts),
    Equivalence("fields that no rendering prints", Level.STRICT, _without_unprinted_fields),
    Equivalence("dropped reasoning", Level.LOOSE, _without_reasoning),
    Equivalence(
        "white space around text", Level.LOOSE, _without_white_space, reason="text_stripped", one_way=True
    ),
    # a client that decodes ids itself gets it where engines show nothing
    Equivalence("U+FFFD for a character that was cut", Level.LOOSE, reason="character_cut"),
    Equivalence("arguments that equal the tool's default", Level.LOOSE, _without_defaults),
    Equivalence("1.0 as 1", Level.LOOSE, number=whole),
    Equivalence("ids of calls and results", Level.LENIENT, numbered_calls, reason="call_ids_renamed"),
    Equivalence(
        "integers rounded to doubles", Level.LENIENT, None, as_double, "integers_rounded", one_way=True
    ),
    Equivalence("a placeholder for text", Level.LENIENT, _without_placeholder, reason="text_dropped"),
    Equivalence("text next to calls", Level.LENIENT, _without_text, reason="text_dropped", one_way=True),
    Equivalence("completed arguments", Level.BARE, _without_arguments, reason="call_repaired"),
)
"""All forms in which clients send back what was sampled. Each is applied to the form of those before it."""
_FORMS = {
    level: [each.form for each in EQUIVALENCES if each.level is level and each.form is not None]
    for level in Level
}


def formed(fields: Fields, level: Level, context: Context) -> Fields:
    """The fields in the form of the equivalences of one level."""
    for form in _FORMS[level]:
        fields = form(fields, context)
    return fields
