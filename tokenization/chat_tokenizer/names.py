"""Finds out whether a template prints the names of messages.

The template is rendered with names and without, over conversations of every structure, with names that are
the strings of its source: see `chat_tokenizer.histories`.
"""

from collections.abc import Iterator
from itertools import product

from chat_tokenizer.errors import InvalidMessages
from chat_tokenizer.histories import ANY_TOOLS, WORD, Messages, assistant, call, result, structures, user
from chat_tokenizer.proof import tried_values
from chat_tokenizer.renderer import Renderer, RenderOptions
from chat_tokenizer.syntax import Syntax

_ROLES = ("system", "user", "assistant", "tool")


def nameless_roles(renderer: Renderer) -> frozenset[str]:
    """The roles of messages whose `name` changes no rendering; none if the template's source is not known."""
    if not renderer.syntax.complete:
        return frozenset()
    printed, rendered = set[str](), set[str]()
    for messages, name, options in _cases(renderer.syntax):
        plain = _text(renderer, messages, options)
        for role in {message["role"] for message in messages}.intersection(_ROLES) - printed:
            named = [{**each, "name": name} if each["role"] == role else each for each in messages]
            if _text(renderer, named, options) != plain:
                printed.add(role)
            elif plain is not None:
                rendered.add(role)
    return frozenset(rendered - printed)


def _cases(syntax: Syntax) -> Iterator[tuple[Messages, str, RenderOptions]]:
    """Conversations, the name to put into their messages, and how they are rendered."""
    arguments = [{name: value} for name in syntax.kwargs for value in tried_values(syntax, name)]
    plain, with_tools = RenderOptions(), RenderOptions(ANY_TOOLS)
    given = [RenderOptions(ANY_TOOLS, True, each) for each in arguments]
    unnamed = [
        [{k: v for k, v in each.items() if k != "name"} for each in messages] for messages in structures()
    ]
    yield from product(unnamed, [WORD], [plain, with_tools])
    everything = [{"role": "system", "content": WORD}, user(), assistant("", tool_calls=[call(8)])]
    everything += [result(8), assistant(), user()]
    long = f"{WORD} " * (sum(syntax.numbers) + 2)
    yield from product([everything], [*syntax.strings, "alpha", long], [plain, with_tools])
    yield from product([everything], [WORD], given)


def _text(renderer: Renderer, messages: Messages, options: RenderOptions) -> str | None:
    """A rendering; None if the template refuses the messages."""
    try:
        return renderer.text(messages, options)
    except InvalidMessages:
        return None
