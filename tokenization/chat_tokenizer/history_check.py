"""Checks that ids are those of a history: each text that no model sampled stands in them, in order.

What a model sampled may be printed in other words later, so nothing of assistant messages is compared. A
template may print a text in another form, cut or escaped: only those texts are looked for that the rendering
of the history holds as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from chat_tokenizer.errors import PrefixMismatch
from chat_tokenizer.messages import Message, Tools
from chat_tokenizer.new_texts import texts_of

if TYPE_CHECKING:
    from chat_tokenizer.chat import ChatTokenizer


def check_history(
    tokenizer: "ChatTokenizer",
    prompt_ids: Sequence[int],
    history: Sequence[Message],
    *,
    tools: Tools | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Check that ids may be those of a history.

    Args:
        prompt_ids: prompt and completion of the turn that ends the history.

    Raises:
        PrefixMismatch: they lack a text of it.
        InvalidMessages: the template refuses the history.
    """
    text = tokenizer.decode(prompt_ids)
    rendered = tokenizer.text(
        history, tools=tools, add_generation_prompt=False, template_kwargs=template_kwargs
    )
    at = printed = 0
    for index, message in enumerate(history):
        if message.get("role") == "assistant":
            continue
        for own in texts_of(message.get("content")):
            written = own.strip()
            start = rendered.find(written, printed)
            if start < 0:
                continue
            printed = start + len(written)
            # a tokenizer may normalise it
            forms = (form for form in _forms(tokenizer, written) if text.find(form, at) >= 0)
            if (form := next(forms, None)) is None:
                raise PrefixMismatch(
                    f"the ids lack the text of messages[{index}] ({message.get('role')}), or have it "
                    f"elsewhere: {written[-80:]!r}; send earlier messages as they were"
                )
            at = text.find(form, at) + len(form)


def _forms(tokenizer: "ChatTokenizer", text: str) -> Iterator[str]:
    """A text, and what is left of it in ids."""
    yield text
    yield tokenizer.decode(tokenizer.encode(text)).strip()
