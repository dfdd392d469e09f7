"""The texts of all benchmarks: agents' conversations from Python's sources, and a language of whole words.

`Texts` is for a real tokenizer. In `Words` every word is one id, so that engines render and sample at almost
no cost.
"""

import json
import random
import sysconfig
from array import array
from pathlib import Path
from typing import Any

import msgspec

from chat_tokenizer import ChatTokenizer

Messages = list[dict[str, Any]]
QUESTION_IDS, ANSWER_IDS = 400, 200
"""Of the messages of a history: of users or tools, and of assistants."""
CALL_ID = "call_00000000"
"""Stands for the id of a tool call, which is another one in every response."""
SYSTEM = {"role": "system", "content": "You fix bugs in a Python repository. Run commands, then explain."}
_PARAMETERS = {"command": {"type": "string"}, "timeout_s": {"type": "integer"}}
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Run a shell command in the repository and return what it prints",
            "parameters": {"type": "object", "properties": _PARAMETERS, "required": ["command"]},
        },
    },
)
_CORPUS_IDS = 500_000
_SEED = 2026


class Answer(msgspec.Struct, frozen=True):
    """What an engine samples."""

    ids: list[int]
    """The sampled ids; the last one is the stop token."""
    pieces: list[str]
    """The text of each sampled id; empty for the stop token."""
    text: str
    """Of the message."""
    prompt: list[int] = []
    """Ids of the prompt, for requests without ids; if there are none, the engine renders the messages."""
    call: bool = False
    """Whether the message has a tool call."""

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message."""
        if not self.call:
            return {"role": "assistant", "content": self.text}
        arguments = json.dumps({"command": "sed -n 40,80p src/cache/queue.py", "timeout_s": 30})
        function = {"name": "run", "arguments": arguments}
        calls = [{"id": CALL_ID, "type": "function", "function": function}]
        return {"role": "assistant", "content": self.text, "tool_calls": calls}


class Texts:
    """Writes messages from the sources of Python's standard library, an agent's usual reading.

    The texts are the same in every run. Their ids are those of the texts, so they compress as real ones do.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer, self._random = tokenizer, random.Random(_SEED)
        self._corpus: list[tuple[int, str]] = []
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            # ASCII only: there each character of a token's string is one of the text
            text, start = file.read_bytes().decode("ascii", "ignore"), 0
            ids = tokenizer.encode(text)
            for token, string in zip(ids, tokenizer.token_strings(ids), strict=True):
                self._corpus.append((token, text[start : start + len(string)]))
                start += len(string)
            if len(self._corpus) > _CORPUS_IDS:
                break

    def take(self, count: int) -> list[tuple[int, str]]:
        """Some consecutive ids, each with its text."""
        start = self._random.randrange(len(self._corpus) - count)
        return self._corpus[start : start + count]

    def ids(self, count: int) -> list[int]:
        """Some consecutive ids."""
        return [token for token, _ in self.take(count)]

    def text(self, count: int) -> str:
        """A text of about this number of ids."""
        return "".join(piece for _, piece in self.take(max(1, count)))

    def result(self, count: int, call: str = CALL_ID) -> Messages:
        """The result of a tool call."""
        return [{"role": "tool", "tool_call_id": call, "content": self.text(count)}]

    def history(self, length: int, *, tools: bool = False, mark: str = "") -> Messages:
        """An agent's conversation that renders to about `length` ids and ends with a question or a result.

        Args:
            tools: whether its assistant calls tools; otherwise it answers questions.
            mark: begins every message but the first.
        """
        self._opening = self._count([], tools)
        left = length - self._opening - 10
        parts = [{"role": "user", "content": mark + self.text(min(QUESTION_IDS, left))}]
        messages = [SYSTEM]
        while (size := self._count(parts, tools) - self._opening) <= left or len(messages) == 1:
            messages += parts
            left -= size
            parts = self._exchange(tools, mark)
        if left > 0:
            messages[-1]["content"] += self.text(left)
        return messages

    def answer(self, count: int) -> Answer:
        """An answer of `count` ids without a tool call."""
        sampled = self.take(count - 1)
        pieces = [piece for _, piece in sampled]
        ids = [*(token for token, _ in sampled), self._tokenizer.stop_id()]
        return Answer(ids, [*pieces, ""], "".join(pieces))

    def calling(self, count: int) -> Answer:
        """An answer with a tool call and `count` ids before it."""
        answer = Answer([], [], self.text(count), call=True)
        opening = [SYSTEM, {"role": "user", "content": "?"}]
        prompt = self._tokenizer.render(opening, tools=TOOLS)
        whole = self._tokenizer.render([*opening, answer.message], tools=TOOLS, add_generation_prompt=False)
        ids = self.until_stop(whole)[len(prompt) :]
        return msgspec.structs.replace(answer, ids=ids, pieces=self._tokenizer.token_strings(ids))

    def until_stop(self, ids: list[int]) -> list[int]:
        """Rendered ids up to the last stop token, as they are sampled."""
        return ids[: len(ids) - ids[::-1].index(self._tokenizer.stop_id(tools=TOOLS))]

    def _exchange(self, tools: bool, mark: str) -> Messages:
        answer = Answer([], [], mark + self.text(ANSWER_IDS), call=tools).message
        if tools:
            return [answer, *self.result(QUESTION_IDS)]
        return [answer, {"role": "user", "content": mark + self.text(QUESTION_IDS)}]

    def _count(self, messages: Messages, tools: bool) -> int:
        declared = TOOLS if tools else None
        return len(self._tokenizer.render([SYSTEM, *messages], tools=declared, add_generation_prompt=False))


_LETTERS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"
_SPECIAL = ("<unk>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
_NAMES = ("system", "user", "assistant", "tool", "run", "{}")
_CLOSING = "<tool_call> run {} </tool_call> <|im_end|>"
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
_MOST_KEPT = 100_000_000
"""Characters of the rendered messages that are kept, about 25 million ids."""


class Words:
    """A vocabulary of 2,000 words of one id each, and how messages are rendered with it.

    Rendered messages are cached: vllm-router sends text, so an engine renders whole conversations, and that
    must not be what is measured.
    """

    def __init__(self) -> None:
        syllables = [first + vowel for first in _LETTERS for vowel in _VOWELS]
        self.words = [first + second for first in syllables for second in syllables][:2000]
        self.strings = [*_SPECIAL, *_NAMES, *self.words]
        self._ids = {string: number for number, string in enumerate(self.strings)}
        self._rendered: dict[tuple[str, str, bool], array[int]] = {}
        self._kept = 0

    def text(self, draw: random.Random, ids: int) -> str:
        """A text of this number of ids."""
        return " ".join(draw.choices(self.words, k=max(1, ids)))

    def encode(self, text: str) -> "array[int]":
        """The ids of a text; 0 for each unknown word."""
        return array("i", (self._ids.get(word, 0) for word in text.split()))

    def render(self, messages: Messages) -> "array[int]":
        """The prompt's ids for a conversation, as the chat template renders it."""
        prompt = array("i")
        for message in messages:
            content = message.get("content") or ""
            if not isinstance(content, str):
                content = "\n".join(part["text"] for part in content)
            key = (message["role"], content, bool(message.get("tool_calls")))
            if key not in self._rendered:
                self._kept += len(content)
                if self._kept > _MOST_KEPT:
                    self._rendered.clear()
                    self._kept = 0
                call = "<tool_call> run {} </tool_call>" if key[2] else ""
                self._rendered[key] = self.encode(f"<|im_start|> {key[0]} {content} {call} <|im_end|>")
            prompt += self._rendered[key]
        return prompt + self.encode("<|im_start|> assistant")

    def sample(self, draw: random.Random, ids: int) -> Answer:
        """A completion that ends with a tool call; it has at least 6 ids."""
        closing = self.encode(_CLOSING)
        sampled = draw.choices(self.words, k=max(1, ids - len(closing)))
        text = " ".join(sampled)
        return Answer([*self.encode(text), *closing], [*sampled, *_CLOSING.split()], text, call=True)

    def write(self, folder: Path) -> None:
        """Write the tokenizer as a model folder."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        tokenizer: dict[str, Any] = {
            "version": "1.0",
            **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
            "added_tokens": [{"id": self._ids[token], "content": token, **flags} for token in _SPECIAL],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": self._ids, "unk_token": "<unk>"},
        }
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "unk_token": "<unk>",
            "chat_template": _TEMPLATE,
        }
        model = {"model_type": "llama", "vocab_size": len(self.strings)}
        for name, content in (("tokenizer", tokenizer), ("tokenizer_config", config), ("config", model)):
            (folder / f"{name}.json").write_text(json.dumps(content))
