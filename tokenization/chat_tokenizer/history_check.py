"""Checks that ids are those of a history: each text that no model sampled stands in them, in order.

What a model sampled may be printed in other words later, so nothing of assistant messages is compared but
their number. A template may print a text in another form, or not at all: what the ids lack counts only if a
rendering of the conversation holds it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from chat_tokenizer.errors import PrefixMismatch, TokenizationError
from chat_tokenizer.messages import Message, Tools
from chat_tokenizer.new_texts import escaped, texts_of

if TYPE_CHECKING:
    from chat_tokenizer.chat import ChatTokenizer


def check_history(
    tokenizer: "ChatTokenizer",
    prompt_ids: Sequence[int],
    history: Sequence[Message],
    new: Sequence[Message],
    *,
    tools: Tools | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Check that ids may be those of a history.

    Args:
        prompt_ids: prompt and completion of the turn that ends the history.
        new: the messages after it.

    Raises:
        PrefixMismatch: they lack a text of it, or a turn.
    """
    text, header = tokenizer.decode(prompt_ids), tokenizer.assistant_header()
    turns = text.count(header) if header else len(history)
    complete = turns >= sum(message.get("role") == "assistant" for message in history)
    if complete and _lacking(tokenizer, text, history) is None:
        return
    try:
        rendered = tokenizer.text([*history, *new], tools=tools, template_kwargs=template_kwargs)
    except TokenizationError:
        return  # nothing shows what the template prints
    if (lacking := _lacking(tokenizer, text, history, rendered)) is not None:
        index, own = lacking
        raise PrefixMismatch(
            f"the ids lack the text of messages[{index}] ({history[index].get('role')}), or have it "
            f"elsewhere: {own[-80:]!r}; send earlier messages as they were"
        )
    # the last header is that of the next turn
    after = 1 + sum(message.get("role") == "assistant" for message in new)
    if header and turns < (printed := rendered.count(header) - after):
        raise PrefixMismatch(
            f"the ids hold {turns} turns, and the messages before their end {printed}: the ids must end with "
            "the last assistant message that was sampled"
        )


def _lacking(
    tokenizer: "ChatTokenizer", text: str, history: Sequence[Message], rendered: str | None = None
) -> tuple[int, str] | None:
    """The first text of a history that a text lacks, and the index of its message.

    Args:
        rendered: of these texts, only those that it holds are looked for.
    """
    at = printed = 0
    for index, message in enumerate(history):
        if message.get("role") == "assistant":
            continue
        for own in map(str.strip, texts_of(message.get("content"))):
            if rendered is not None:
                end = _end_of(rendered, iter((own, *escaped(own))), printed)
                if end is None:
                    continue
                printed = end
            end = _end_of(text, _forms(tokenizer, own), at)
            if end is None:
                return index, own
            at = end
    return None


def _forms(tokenizer: "ChatTokenizer", text: str) -> Iterator[str]:
    """A text as templates print it, and what a tokenizer that normalises leaves of it."""
    for form in (text, *escaped(text)):
        yield form
        yield tokenizer.decode(tokenizer.encode(form)).strip()


def _end_of(text: str, forms: Iterator[str], start: int) -> int | None:
    """Where the first of the forms that a text holds ends in it; None if it holds none."""
    return next((at + len(form) for form in forms if (at := text.find(form, start)) >= 0), None)
