"""A tokenizer small enough to be trained in a test: byte-level BPE, ChatML with tools, no network."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = 2
"""Id of <|im_end|>, which closes every turn."""
HI = (74, 75)
"""Ids of the letters of "hi"."""
SPLIT = (74, 71, 78, 78, 81, END)
"""Of "hello", an id for each letter: a tokenizer gives three."""
VOCAB_SIZE = 320
"""What config.json says: more than the tokenizer has, as where an embedding is padded."""

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\n' }}
{%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role not in ('system', 'user', 'assistant', 'tool') %}
{{- raise_exception('unknown role ' + message.role) }}{% endif %}
{%- if message.role == 'tool' and (loop.first or loop.previtem.role not in ('assistant', 'tool')) %}
{{- raise_exception('a tool result without a call') }}{% endif %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"""

_TEXTS = ("hello there, what is the weather in Paris today?", "user assistant system tool call result think")


@dataclass
class TinyModel:
    """A model folder, and the plain transformers tokenizer of it as the reference."""

    folder: Path
    reference: Any = field(repr=False)
    vocab_size: int = VOCAB_SIZE
    """What config.json says."""
    renders_requests: ClassVar[bool] = False
    """Whether it takes messages as a request has them, not as vLLM prepares them for a template."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """One that `make_tiny_model` wrote."""
        size = json.loads((folder / "config.json").read_text())["vocab_size"]
        return cls(folder, AutoTokenizer.from_pretrained(folder), size)

    def render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Ids of a conversation, with nothing of this project in between."""
        # as in vLLM, fields of a request win over template arguments of the same name
        kwargs = {"continue_final_message": False, **kwargs, "add_generation_prompt": add_generation_prompt}
        kwargs["tokenize"] = False
        text = self.reference.apply_chat_template(messages, **kwargs)
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        ids: list[int] = self.reference.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out."""
        text: str = self.reference.decode(ids, skip_special_tokens=True)
        return text


def make_tiny_model(folder: Path, chat_template: str = CHATML) -> TinyModel:
    """Train the tokenizer and save it as a model folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return save_model(folder, tokenizer, chat_template, VOCAB_SIZE)


def save_model(folder: Path, tokenizer: Tokenizer, chat_template: str, vocab_size: int) -> TinyModel:
    """Save a tokenizer with the tokens of `SPECIAL_TOKENS` as a model folder."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[END])
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": vocab_size}))
    return TinyModel.load(folder)
