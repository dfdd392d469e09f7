"""Tiny models that a fake engine renders by a layout, as vLLM does for models without a template."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tokenizers import AddedToken

from tests.support.renderers.layouts import LAYOUTS
from tests.support.renderers.pieces import CUT, Marker, Message, Pieces, words
from tests.support.tiny_model import END, TinyModel, make_tiny_model

_ENDS = ("</s>", "<\uff5cend▁of▁sentence\uff5c>", "<|content_model_end_sampling|>", "<|end_of_msg|>")
"""What ends a turn in each layout; the tiny vocabulary has one such token."""
_MARKERS = {
    "mistral": words(
        "<s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] "
        "[TOOL_CALLS] [CALL_ID] [ARGS] [TOOL_RESULTS] [TOOL_CONTENT] [/TOOL_RESULTS] [THINK] [/THINK]"
    ),
    "deepseek": words(
        "<\uff5cbegin▁of▁sentence\uff5c> <\uff5cUser\uff5c> <\uff5cAssistant\uff5c> "
        "\uff5cDSML\uff5c <think> </think>"
    ),
    "harmony": words("<|start|> <|channel|> <|message|> <|end|> <|call|>"),
    "inkling": words(
        "<|message_user|> <|message_model|> <|message_system|> <|message_tool|> <|content_text|> "
        "<|content_thinking|> <|unused_200024|> <|content_invoke_tool_json|> <|end_message|>"
    ),
    "kimi": words("<|open|> <|close|> <|sep|>"),
}
"""By the first word of a layout's name."""


def ids_of(pieces: Pieces, marker: Callable[[str], int], encode: Callable[[str], list[int]]) -> list[int]:
    """The ids of a rendering: texts that stand next to each other are encoded as one."""
    ids: list[int] = []
    text = ""
    for piece in [*pieces, CUT]:
        if not isinstance(piece, Marker):
            text += piece
            continue
        ids += encode(text) if text else []
        ids += [marker(piece)] if piece else []
        text = ""
    return ids


class StandIn(TinyModel):
    """A model folder with no chat template, and the renderer that its engine would have."""

    renders_requests = True
    layout_name: str = ""

    @classmethod
    def make(cls, folder: Path, name: str) -> Self:
        """One with a layout of `LAYOUTS`, written to a folder."""
        tiny = make_tiny_model(folder)
        tiny.reference.chat_template = None
        tiny.reference.add_tokens([AddedToken(text, special=True) for text in _MARKERS[name.split("_")[0]]])
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        tiny.reference.save_pretrained(folder)
        model = cls.load(folder)
        model.layout_name = name
        return model

    @cached_property
    def vocabulary(self) -> Mapping[str, int]:
        return {**self.reference.get_vocab(), **dict.fromkeys(_ENDS, END)}

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Message] | None = None,
        **options: Any,
    ) -> list[int]:
        """Ids of a conversation. Raises Unrenderable."""
        options["add_generation_prompt"] = add_generation_prompt
        pieces = LAYOUTS[self.layout_name](messages, tools or [], options)
        return ids_of(pieces, self.vocabulary.__getitem__, self.encode)
