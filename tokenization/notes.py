"""Notes on where the template would print a sampled turn differently from the ids that were sampled.

The sampled ids stay as they are. A note tells the caller that a rendering of the whole history would have
shown the model other text for that turn.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenization.errors import TokenizationError
from tokenization.messages import Message
from tokenization.new_texts import unused_mark
from tokenization.template import Template
from tokenization.turns import PLACEHOLDER_USER, RenderOptions

TURN_END_REWRITTEN = "turn_end_rewritten"
"""The template ends the turn with another stop token than the sampled one."""
THINKING_STRIPPED = "thinking_stripped"
"""The template drops the turn's reasoning once the new messages follow."""
ARGUMENTS_REWRITTEN = "arguments_rewritten"
"""The template prints the arguments of a tool call as other JSON text than the turn has."""


def differences(
    template: Template, turn: Message, new: Sequence[Message], options: RenderOptions
) -> tuple[str, ...]:
    """Notes on the reasoning and the tool-call arguments of an assistant turn that `new` follows.

    Empty where the template cannot render the turn after a single user message.
    """
    notes = []
    if turn.get("reasoning") or turn.get("reasoning_content"):
        mark = unused_mark([turn], new, options.tools, dict(options.kwargs))
        marked = {**turn, "reasoning": mark, "reasoning_content": mark}
        last, followed = _text(template, marked, [], options), _text(template, marked, new, options)
        if mark in last and followed and mark not in followed:
            notes.append(THINKING_STRIPPED)
    arguments = [_arguments(call) for call in turn.get("tool_calls") or []]
    # arguments given as an object have no text of their own that could differ
    argument_texts = [text for text in arguments if isinstance(text, str)]
    if argument_texts:
        rendering = _text(template, turn, [], options)
        if rendering and any(text not in rendering for text in argument_texts):
            notes.append(ARGUMENTS_REWRITTEN)
    return tuple(notes)


def _arguments(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    return function.get("arguments") if isinstance(function, Mapping) else None


def _text(template: Template, turn: Message, new: Sequence[Message], options: RenderOptions) -> str:
    messages: list[Mapping[str, Any]] = [PLACEHOLDER_USER, turn, *new]
    try:
        return template.text(messages, options.tools, False, options.kwargs)
    except TokenizationError:
        return ""
