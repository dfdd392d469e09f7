"""A tokenizer for each template: a small vocabulary with the added tokens of the model.

The byte-level BPE has the first merges of SmolLM2, the model of the demo; a part, so that loading takes
milliseconds. The merges are in a file, because the package of the model cannot be read without torch. If the
real model has a SentencePiece vocabulary, the template is paired a second time, with a small SentencePiece
vocabulary, in which the ids of a text depend on the text before it.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.templates.families import TEMPLATES, Family, Template

MERGES_FILE = Path(__file__).with_name("smollm2_merges.txt")
_SPACE = "▁"
_CORPUS = (
    "the weather in Zürich is sunny today and the clock in Oslo says nine " * 3,
    "user model assistant",
)


@dataclass(frozen=True)
class Pairing:
    """A template with a kind of tokenizer."""

    template: Template
    tokenizer: str
    """A key of `TOKENIZERS`."""

    @property
    def name(self) -> str:
        return self.template.name + ("" if self.tokenizer == "bytes" else f" on {self.tokenizer}")


@functools.cache
def smollm2_merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The first 6,000 tokens of SmolLM2 that are not special, with their ids, and their merges.

    The first line of `MERGES_FILE` has the single characters; each further line has one merge, by rank.
    """
    characters, *lines = MERGES_FILE.read_text("utf-8").splitlines()
    merges = [(left, right) for left, right in map(str.split, lines)]
    tokens = [*characters.split(), *(left + right for left, right in merges)]
    return {token: index for index, token in enumerate(tokens)}, merges


def byte_level() -> Tokenizer:
    """Bytes and real merges: the ids after a special token never depend on the text before it."""
    vocab, merges = smollm2_merges()
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, continuing_subword_prefix="", end_of_word_suffix="")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece() -> Tokenizer:
    """A BPE with `▁` for spaces and byte fallback, as in converted SentencePiece models."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    description = json.loads(trained.to_str())
    words = [f"<0x{byte:02X}>" for byte in range(256)]
    words += [token for token in description["model"]["vocab"] if token not in words]
    description["model"] |= {
        "vocab": {token: index for index, token in enumerate(words)},
        "byte_fallback": True,
    }
    return Tokenizer.from_str(json.dumps({**description, "added_tokens": [], "pre_tokenizer": None}))


def gemma_like() -> Tokenizer:
    """Replaces spaces by `▁`; adds nothing before a text."""
    tokenizer = _sentencepiece()
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def llama2_like() -> Tokenizer:
    """Adds `▁` before every stretch of text, also after each special token."""
    tokenizer = gemma_like()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )
    return tokenizer


def mistral_like() -> Tokenizer:
    """Adds `▁` before the first stretch of text only, so a suffix that is encoded alone has one too many."""
    tokenizer = _sentencepiece()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_level,
    "gemma_like": gemma_like,
    "llama2_like": llama2_like,
    "mistral_like": mistral_like,
}
_SENTENCEPIECE = {
    "gemma": "gemma_like",
    "gemma3": "gemma_like",
    "gemma4_v5": "gemma_like",
    "phi3": "llama2_like",
    "phi3_5": "llama2_like",
    "llava_next": "mistral_like",
}
PAIRINGS = (
    *(Pairing(template, "bytes") for template in TEMPLATES.values()),
    *(Pairing(TEMPLATES[name], tokenizer) for name, tokenizer in _SENTENCEPIECE.items()),
)

SAMPLE = (
    *("qwen3", "gptoss", "glm4moe", "llama3_2", "deepseekv3", "cohere2", "phi3"),
    *("gemma4_v5 on gemma_like", "phi3 on llama2_like", "llava_next on mistral_like"),
)
"""Names of the pairings in `make test-fast`: they cover each tokenizer and each way to end a turn."""
EVERY_PAIRING = pytest.mark.parametrize(
    "pairing",
    [
        pytest.param(pairing, id=pairing.name, marks=() if pairing.name in SAMPLE else pytest.mark.slow)
        for pairing in PAIRINGS
    ],
)
"""Parametrises a test with all pairings; those outside the sample are marked as slow."""


def save_tokenizer(pairing: Pairing, folder: Path) -> Any:
    """Write the pairing's tokenizer to a folder. Returns the transformers tokenizer, as the reference."""
    family = pairing.template.family
    backend = TOKENIZERS[pairing.tokenizer]()
    backend.add_special_tokens([_added_token(text, family, special=True) for text in family.special.split()])
    backend.add_tokens([_added_token(text, family, special=False) for text in family.plain.split()])
    named_tokens = {"eos_token": family.eos, "bos_token": family.bos}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, **{name: text for name, text in named_tokens.items() if text is not None}
    )
    fast.chat_template = pairing.template.source
    fast.save_pretrained(folder)
    return fast


def _added_token(text: str, family: Family, *, special: bool) -> AddedToken:
    return AddedToken(text, special=special, normalized=False, rstrip=text in family.rstrip.split())
