"""Conversations for the proof that a template is local: histories that might change what follows a turn.

Each is the part of a conversation before the sampled turn. Most differ from a plain question in a single
property, so that no effect hides another.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chat_tokenizer.syntax import Syntax

Messages = list[dict[str, Any]]
ANY_TOOLS: Sequence[Mapping[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "alpha",
            "description": "Tells.",
            "parameters": {
                "type": "object",
                "properties": {"q": {"type": "string", "description": "What."}},
                "required": ["q"],
            },
        },
    }
]
"""A tool, for templates that need one."""
WORD = "qw"
"""Text of earlier messages. No placeholder of `chat_tokenizer.turns` has it, so that an echo of it shows."""
_STANDARD_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass(frozen=True, slots=True)
class Step:
    """A sampled turn and the messages after it."""

    turn: dict[str, Any]
    new: Messages

    @property
    def after_results(self) -> bool:
        """Whether the new messages begin with tool results."""
        return bool(self.new) and self.new[0]["role"] == "tool"


def user(content: object = WORD) -> dict[str, Any]:
    """A user message."""
    return {"role": "user", "content": content}


def assistant(content: object = WORD, **fields: Any) -> dict[str, Any]:
    """An assistant turn."""
    return {"role": "assistant", "content": content, **fields}


def call(index: int = 0, name: str = "alpha", arguments: object = None) -> dict[str, Any]:
    """A tool call. Its id has nine characters, which some templates require."""
    function = {"name": name, "arguments": {"q": WORD} if arguments is None else arguments}
    return {"id": f"call{index:05}", "type": "function", "function": function}


def result(index: int = 0, content: object = "qr", **fields: Any) -> dict[str, Any]:
    """The result of the call with that index."""
    return {"role": "tool", "tool_call_id": f"call{index:05}", "content": content, **fields}


def _calls(
    *indices: int, content: object = "", name: str = "alpha", arguments: object = None, **fields: Any
) -> dict[str, Any]:
    calls = [call(index, name, arguments) for index in indices]
    return assistant(content, tool_calls=calls, **fields)


PRINCIPAL_STEPS = (
    Step(assistant(), [user("qn")]),
    Step(_calls(1), [result(1)]),
    Step(_calls(1, 2), [result(1), result(2, "qs")]),
    Step(_calls(1), [result(1), user("qn")]),
)
"""The steps that are tried after every history."""
UNANSWERED = Step(_calls(1), [user("qn")])
"""A turn with a call that a user message follows."""


def steps() -> Iterator[Step]:
    """Sampled turns and new messages of every kind."""
    yield from PRINCIPAL_STEPS
    parts = [{"type": "text", "text": "qn"}, {"type": "text", "text": "qp"}]
    yield Step(assistant(), [user(parts)])
    yield Step(assistant(), [user("qn"), user("qp")])
    yield Step(assistant("qn"), [user("qn")])  # the text of the turn
    yield Step(assistant(reasoning=WORD), [user("qn")])
    yield Step(assistant(), [user("qn"), assistant("qa"), user("qp")])
    yield Step(assistant(), [user("qn"), _calls(3), result(3), assistant("qa"), user("qp")])
    yield Step(_calls(1), [result(1), _calls(3), result(3)])
    yield Step(_calls(1, content=WORD), [result(1)])
    yield Step(_calls(1, reasoning=WORD), [result(1)])
    yield Step(_calls(1), [result(1, name="alpha")])
    yield Step(assistant("", tool_calls=[call(1, arguments={})]), [result(1)])
    yield Step(_calls(1, arguments={"q": "qv", "r": [1, None]}), [result(1)])
    yield Step(_calls(1, 2, 3), [result(1), result(2, "qs"), result(3, "qt")])
    yield Step(_calls(1, content=" \n"), [result(1)])
    yield Step(_calls(1, content=None), [result(1)])
    yield UNANSWERED
    yield Step(_calls(1, 2), [result(2), result(1, "qs")])
    yield Step(_calls(1, 2), [result(1)])
    yield Step(_calls(1, 2, arguments={"r": "qv"}), [result(1), user("qn")])
    yield Step(_calls(1, 2, name="omega"), [result(1), result(2, "qs"), user("qn")])
    yield Step(_calls(1, 1), [result(1), result(1, "qs")])
    yield Step(assistant(), [result(1)])
    yield Step(assistant(reasoning=WORD), [result(1)])


def steps_with_strings(syntax: Syntax) -> Iterator[Step]:
    """Steps with each role, and turns with a long text or with each string of the template."""
    yield Step(assistant(_long_text(syntax)), [user("qn")])
    for role in ("system", "developer", *_other_roles(syntax)):
        yield Step(assistant(), [{"role": role, "content": "qn"}])
        yield Step(assistant(), [{"role": role, "content": "qn"}, user("qp")])
    for string in syntax.strings:
        yield Step(assistant(f"{WORD} {string}"), [user("qn")])
        yield Step(assistant(string), [user("qn")])
        yield Step(_calls(1, name=string or "alpha"), [result(1)])
        yield Step(_calls(1, arguments={string: string}), [result(1)])
        yield Step(_calls(1, arguments=dict.fromkeys(syntax.fields, string)), [result(1)])
    for name in syntax.fields:
        yield Step(_calls(1, arguments={name: "qv"}), [result(1)])


def steps_with_new_string(string: str) -> Iterator[Step]:
    """Steps whose new message is a string of the template."""
    yield Step(assistant(), [user(string)])
    yield Step(_calls(1), [result(1, string)])


def structures() -> Iterator[Messages]:
    """Short histories of every structure: turns, calls and results, parts, reasoning."""
    system, exchange = {"role": "system", "content": WORD}, [user(), assistant()]
    round_of_calls = [user(), _calls(8), result(8)]
    yield [system, user()]
    yield [*exchange, user()]
    yield [system, *exchange, user()]
    yield [user(), user()]
    yield [user("")]
    yield [{"role": "system", "content": ""}, user()]
    yield [user("qn")]  # the text of the new message
    yield [user(), assistant(), assistant(), user()]
    yield [assistant(), user()]
    yield [*exchange, system, user()]
    yield [system, system, user()]
    yield [user([{"type": "text", "text": WORD}, {"type": "text", "text": WORD}])]
    yield [{**user(), "name": "alpha"}]
    yield [user(), assistant(reasoning=WORD), user()]
    yield [user(), assistant(reasoning=WORD, tool_calls=[call(8)]), result(8)]
    yield round_of_calls
    yield [system, *round_of_calls]
    yield [*round_of_calls, assistant(), user()]
    yield [*round_of_calls, _calls(9), result(9)]
    yield [*round_of_calls, _calls(9, name="omega"), result(9)]
    yield [user(), _calls(5, 6, 7), result(5), result(6), result(7), assistant(), user()]
    yield [user(), _calls(8, content=WORD), result(8)]
    yield [user(), _calls(8, 9), result(8), result(9)]
    yield [user(), _calls(8, 9), result(9), result(8), assistant(), user()]
    yield [user(), _calls(8, 9), result(8), assistant(), user()]
    yield [user(), _calls(8), assistant(), user()]
    yield [user(), _calls(1, 2), result(1), result(2), assistant(), user()]
    yield [user(), _calls(1), result(1), _calls(1), result(1)]
    yield [user(), result(8), assistant(), user()]
    yield [user(), assistant(""), user()]
    yield [user(), assistant(None, tool_calls=[call(8)]), result(8, name="alpha")]
    # without a user message: the next one may be printed as the first
    yield []
    yield [system]
    yield [system, system]
    yield [assistant()]
    yield [system, assistant()]
    yield [result(8)]
    yield [result(8), assistant()]
    yield [_calls(8), result(8)]
    yield [system, _calls(8), result(8)]


def with_images(syntax: Syntax) -> Iterator[tuple[Messages, Step]]:
    """Histories with images, and a new message with one, if the template names images."""
    if "image" not in syntax.strings and "image_url" not in syntax.strings:
        return
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    shown, shows = (
        user([image, {"type": "text", "text": WORD}]),
        user([image, {"type": "text", "text": "qn"}]),
    )
    for history in ([shown], [user(), assistant(), shown], [shown, assistant(), user()]):
        yield history, Step(assistant(), [shows])


def with_roles(syntax: Syntax) -> Iterator[Messages]:
    """Histories that hold a message of each other role."""
    for role in ("developer", *_other_roles(syntax)):
        message = {"role": role, "content": WORD}
        yield [message, user()]
        yield [user(), assistant(), message, user()]
        yield [user(), assistant(), message]


def with_fields(syntax: Syntax) -> Iterator[Messages]:
    """Histories in which one message has a field that the template reads."""
    for name in syntax.fields:
        for role in ("system", "developer", "user"):
            if name not in ("role", "content"):
                yield [{"role": role, "content": WORD, name: WORD}, user()]


def with_text(text: str) -> Iterator[Messages]:
    """Histories that hold a text, each in one message."""
    yield [{"role": "system", "content": text}, user()]
    yield [{"role": "developer", "content": text}, user()]
    yield [user(text)]
    yield [user(text), assistant(), user()]
    yield [{**user(), "name": text}, assistant(), user()]
    yield [user(), {**assistant(), "name": text}, user()]
    yield [user(), assistant(text), user()]
    yield [user(), _calls(8), result(8, text)]


def with_string(string: str) -> Iterator[Messages]:
    """Histories that hold a string of the template in one place: once as the whole text, or more often."""
    yield from with_text(string)
    yield from with_text(f"{WORD} {string} {string} {string} {WORD}")
    yield [{"role": "system", "content": [{"type": "text", "text": string}]}, user()]
    yield [user(), assistant(reasoning=string), user()]
    yield [user(), _calls(8, name=string or "alpha"), result(8)]
    yield [user(), _calls(8, arguments={string: string}), result(8)]
    yield [user(), _calls(8), result(8, name=string)]


def with_strings(syntax: Syntax) -> Iterator[Messages]:
    """Histories that hold all strings of the template at once, and each in a system message far away."""
    yield from with_text(" ".join(syntax.strings))
    exchanges = [user(), assistant()] * 4
    for string in syntax.strings:
        yield [{"role": "system", "content": f"{WORD} {string}"}, *exchanges, user()]


def long_steps(syntax: Syntax) -> Iterator[Step]:
    """Steps with long new messages."""
    yield Step(assistant(), [user(_long_text(syntax))])
    yield Step(_calls(1), [result(1, _long_text(syntax))])


def lengths(syntax: Syntax) -> Iterator[Messages]:
    """Histories of more messages, turns and calls, and of longer texts, than the template's numbers together.

    The number of messages is even and odd, and equal to each of the template's numbers.
    """
    system = {"role": "system", "content": WORD}
    for number in syntax.numbers:
        # as many messages as a number: with the turn and one or two new ones, with the turn, and without
        for messages in range(max(number - 3, 1), number + 1):
            alternating = [user(), *([assistant(), user()] * ((messages - 1) // 2))]
            yield alternating if messages % 2 else [system, *alternating]
    count = sum(syntax.numbers) + 2
    exchanges = [message for _ in range(count) for message in (user(), assistant())]
    yield [*exchanges, user()]
    yield [{"role": "system", "content": WORD}, *exchanges, user()]
    yield [*[user() for _ in range(count)], user()]
    rounds: Messages = [user()]
    for index in range(10, 10 + count):
        rounds += [_calls(index), result(index)]
    yield rounds
    yield [*rounds, assistant(), user()]
    yield from with_text(_long_text(syntax))


def _long_text(syntax: Syntax) -> str:
    """A text of more characters, words and lines than the template's numbers together."""
    return f"{WORD}\n" * (sum(syntax.numbers) + 2)


def _other_roles(syntax: Syntax) -> Sequence[str]:
    """Strings of the template that might be roles."""
    return [string for string in syntax.strings if string.isidentifier() and string not in _STANDARD_ROLES]
