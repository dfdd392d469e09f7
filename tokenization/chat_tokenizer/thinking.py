"""Finds the reasoning of earlier turns that a chat template leaves out.

Many templates print the reasoning of an assistant message only after the last user message. A prompt that
keeps all sampled ids then shows the model more than a rendering of the same messages does.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from chat_tokenizer.chat import ChatTokenizer
from chat_tokenizer.messages import Message, Tools

_MARK = "thought-%d-of-7f3c"
"""A text that no template prints itself, and that stays as it is in every rendering."""
_END = "</think>"
"""Where reasoning ends that a model without a reasoning parser has in its content."""


def hidden_reasoning(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    thinking: Collection[int],
    *,
    tools: Tools | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> set[int]:
    """Those of some assistant messages whose reasoning a rendering of the conversation does not show.

    The text is rendered once and not tokenised.

    Args:
        messages: the conversation; the reasoning itself may be missing in it.
        thinking: indexes of the assistant messages that have reasoning, also of those whose content ends it
            with `</think>`.

    Raises:
        InvalidMessages: the template refuses the messages.
    """
    marked = [
        _with_mark(message, _MARK % index) if index in thinking else message
        for index, message in enumerate(messages)
    ]
    text = tokenizer.text(marked, tools=tools, template_kwargs=template_kwargs)
    return {index for index in thinking if _MARK % index not in text}


def ends_thinking(message: Message) -> bool:
    """Whether the content of an assistant message holds its reasoning."""
    return _END in _text(message)


def _with_mark(message: Message, mark: str) -> Message:
    """The message with a mark as its reasoning."""
    text = _text(message)
    if _END in text:
        before, _, after = text.partition(_END)
        return {**message, "content": f"{before}{mark}{_END}{after}"}
    return {**message, "reasoning": mark, "reasoning_content": mark}


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    texts = [part.get("text") for part in content if isinstance(part, Mapping)]
    return "\n".join(text for text in texts if isinstance(text, str))
