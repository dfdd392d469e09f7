"""Finds out what of a message a template does not print: names, and fields that the API does not have.

The template is rendered with them and without, over conversations of every structure, with values that are
the strings of its source: see `chat_tokenizer.histories`.
"""

from collections.abc import Iterator, Set
from itertools import product
from typing import Any

from chat_tokenizer.equivalences import CALL, PART, Unprinted
from chat_tokenizer.errors import InvalidMessages
from chat_tokenizer.histories import ANY_TOOLS, WORD, Messages, assistant, call, result, structures, user
from chat_tokenizer.proof import tried_values
from chat_tokenizer.renderer import Renderer, RenderOptions
from chat_tokenizer.syntax import Syntax

_ROLES = ("system", "user", "assistant", "tool")
_Addition = tuple[str, str]
"""A role and "name", or `CALL` or `PART` and a field that the API does not have there."""


def unprinted(renderer: Renderer) -> Unprinted:
    """What changes no rendering; nothing if the template's source is not known. May take a second."""
    content_format = renderer.content_format
    if not renderer.syntax.complete:
        return Unprinted(content_format=content_format)
    printed, rendered = set[_Addition](), set[_Addition]()
    for messages, value, options in _cases(renderer.syntax):
        plain = _text(renderer, messages, options)
        for additions in _groups(messages, renderer.syntax):
            # all at once, and one by one where that changes something
            tried = [additions - printed]
            while tried:
                group = tried.pop()
                values = [value, dict.fromkeys(renderer.syntax.fields, value)] if value == WORD else [value]
                changed = [_text(renderer, _with(messages, group, each), options) for each in values]
                if any(each != plain for each in changed):
                    printed |= group if len(group) == 1 else set()
                    tried += [{each} for each in group] if len(group) > 1 else []
                elif plain is not None:
                    rendered |= group
    names = {role for role, _ in rendered - printed if role in _ROLES}
    kinds = {kind for kind in (CALL, PART) if (kind, WORD) in rendered - printed}
    exceptions = {(kind, field) for kind, field in printed if kind in kinds}
    return Unprinted(frozenset(names), frozenset(kinds), frozenset(exceptions), content_format)


def _groups(messages: Messages, syntax: Syntax) -> Iterator[set[_Addition]]:
    """What to add to a conversation: to the messages of each role a name; fields to its calls and parts."""
    for role in {message["role"] for message in messages}.intersection(_ROLES):
        yield {(role, "name")}
    fields = {WORD, "cache_control", *syntax.fields, *syntax.strings}
    if any(each.get("tool_calls") for each in messages):
        yield {(CALL, field) for field in fields}
    if any(each["content"] and each["role"] != "tool" for each in messages):
        yield {(PART, field) for field in fields}


def _with(messages: Messages, additions: Set[_Addition], value: object) -> Messages:
    more = {field: value for _, field in additions}
    kinds = {kind for kind, _ in additions}
    if CALL in kinds:
        return [_with_call_fields(each, more) for each in messages]
    if PART in kinds:
        return [_with_part_fields(each, more) for each in messages]
    return [{**each, **more} if each["role"] in kinds else each for each in messages]


def _with_call_fields(message: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**more, **each, "function": {**more, **each["function"]}} for each in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def _with_part_fields(message: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if not content or message["role"] == "tool":
        return message
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return {**message, "content": [{**more, "type": "text", "text": text} for text in texts]}


def _cases(syntax: Syntax) -> Iterator[tuple[Messages, str, RenderOptions]]:
    """Conversations, the value to put into their messages, and how they are rendered."""
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
