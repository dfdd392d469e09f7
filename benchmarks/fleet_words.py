"""The language of the fleet benchmark: every word is one id, so that rendering and sampling cost little.

Each message is rendered once and cached: vllm-router sends text, so an engine renders whole conversations,
and that must not be what is measured.
"""

import json
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

WORDS = 2000
_MOST_KEPT = 100_000_000
"""Characters of the messages that are kept, about 25 million ids."""
_LETTERS = "bcdfghjklmnprstvwz"
_VOWELS = "aeiou"
_SPECIAL = ("<unk>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
_NAMES = ("system", "user", "assistant", "tool", "run", "{}")
_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|> ' + message.role + ' ' + (message.content or '') + ' ' }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '<tool_call> ' + call.function.name + ' {} </tool_call> ' }}"
    "{%- endfor %}"
    "{{- '<|im_end|> ' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)


class Call(msgspec.Struct):
    """A tool call in a message. There is one tool, without arguments."""

    id: str


class Part(msgspec.Struct):
    """A part of a content that is a list."""

    text: str = ""


class Message(msgspec.Struct):
    """A message of a request, as far as it is rendered."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[Call] | None = None

    @property
    def text(self) -> str:
        """Its content as one text."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class Words:
    """The vocabulary, and how messages are rendered with it."""

    def __init__(self) -> None:
        syllables = [first + vowel for first in _LETTERS for vowel in _VOWELS]
        self.words = [first + second for first in syllables for second in syllables][:WORDS]
        self.strings = [*_SPECIAL, *_NAMES, *self.words]
        self._ids = {string: number for number, string in enumerate(self.strings)}
        self._first_word = len(_SPECIAL) + len(_NAMES)
        self._rendered: dict[tuple[str, str, bool], array[int]] = {}
        self._kept = 0
        """Characters of the messages in `_rendered`."""
        self._generation_prompt = self.encode("<|im_start|> assistant")

    def text(self, draw: random.Random, ids: int) -> str:
        """A text of this number of ids."""
        return " ".join(draw.choices(self.words, k=ids))

    def encode(self, text: str) -> "array[int]":
        """The ids of a text; 0 for each unknown word, of which only requests of discovery have any."""
        return array("i", (self._ids.get(word, 0) for word in text.split()))

    def render(self, messages: Sequence[Message]) -> "array[int]":
        """The prompt's ids for a conversation, as the chat template renders it."""
        prompt = array("i")
        for message in messages:
            key = (message.role, message.text, bool(message.tool_calls))
            if key not in self._rendered:
                call = "<tool_call> run {} </tool_call>" if message.tool_calls else ""
                self._evict(len(key[1]))
                self._rendered[key] = self.encode(f"<|im_start|> {key[0]} {key[1]} {call} <|im_end|>")
            prompt += self._rendered[key]
        return prompt + self._generation_prompt

    def _evict(self, size: int) -> None:
        """Forget all messages before they take too much memory: a long run has new ones without end."""
        self._kept += size
        if self._kept > _MOST_KEPT:
            self._rendered.clear()
            self._kept = size

    def sample(self, draw: random.Random, ids: int) -> tuple[str, "array[int]"]:
        """The text of a completion that ends with a tool call, and its ids, of which there are at least 6."""
        closing = self.encode("<tool_call> run {} </tool_call> <|im_end|>")
        sampled = draw.choices(range(self._first_word, len(self.strings)), k=max(1, ids - len(closing)))
        return " ".join(map(self.strings.__getitem__, sampled)), array("i", sampled) + closing

    def write(self, folder: Path) -> None:
        """Write the tokenizer as a model folder."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        added = [{"id": self._ids[special], "content": special, **flags} for special in _SPECIAL]
        absent = ("truncation", "padding", "normalizer", "post_processor", "decoder")
        tokenizer: dict[str, Any] = {
            "version": "1.0",
            **dict.fromkeys(absent),
            "added_tokens": added,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": self._ids, "unk_token": "<unk>"},
        }
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "unk_token": "<unk>",
            "chat_template": _TEMPLATE,
        }
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        model = {"model_type": "llama", "vocab_size": len(self.strings)}
        (folder / "config.json").write_text(json.dumps(model))
