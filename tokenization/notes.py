"""What a template would have shown of a sampled turn, had it rendered the history anew.

The sampled ids win; these words say where the template's own text would have differed from them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenization.errors import TokenizationError
from tokenization.messages import Message
from tokenization.template import Template
from tokenization.turns import ASKING, Setting, free_mark

TURN_END_REWRITTEN = "turn_end_rewritten"
THINKING_STRIPPED = "thinking_stripped"
ARGUMENTS_REWRITTEN = "arguments_rewritten"


def differences(
    template: Template, turn: Message, new: Sequence[Message], setting: Setting
) -> tuple[str, ...]:
    """Notes on an assistant turn that `new` follows.

    Where the template cannot render the turn in a conversation of its own, nothing is said about it.
    """
    found = []
    if turn.get("reasoning") or turn.get("reasoning_content"):
        mark = free_mark([turn], new, setting)
        marked = {**turn, "reasoning": mark, "reasoning_content": mark}
        alone, followed = _text(template, marked, [], setting), _text(template, marked, new, setting)
        if mark in alone and followed and mark not in followed:
            found.append(THINKING_STRIPPED)
    arguments = [_arguments(call) for call in turn.get("tool_calls") or []]
    written = [text for text in arguments if isinstance(text, str)]
    if written:
        shown = _text(template, turn, [], setting)
        if shown and any(text not in shown for text in written):
            found.append(ARGUMENTS_REWRITTEN)
    return tuple(found)


def _arguments(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    return function.get("arguments") if isinstance(function, Mapping) else None


def _text(template: Template, turn: Message, new: Sequence[Message], setting: Setting) -> str:
    messages: list[Mapping[str, Any]] = [ASKING, turn, *new]
    try:
        return template.text(messages, setting.tools, False, setting.kwargs)
    except TokenizationError:
        return ""
