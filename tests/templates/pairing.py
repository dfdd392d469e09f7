"""A tokenizer for each template: a real vocabulary, cut short, with the model's own added tokens.

Byte-level BPE comes from SmolLM2, the demo's model: its first merges, so that loading takes milliseconds.
Where the real model has a SentencePiece vocabulary, the template is paired a second time with a small one of
the same build, because there a text's ids depend on what stands before it.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from proxy.demo.checkpoint import ensure_checkpoint
from tests.templates.families import TEMPLATES, Family, Template

_VOCAB_SIZE = 6000
_SPACE = "▁"
_CORPUS = (
    "the weather in Zürich is sunny today and the clock in Oslo says nine " * 3,
    "user model assistant",
)


@dataclass(frozen=True)
class Pairing:
    """A template with the kind of tokenizer it is tried on."""

    template: Template
    tokenizer: str
    """A key of `TOKENIZERS`."""

    @property
    def name(self) -> str:
        return self.template.name + ("" if self.tokenizer == "bytes" else f" on {self.tokenizer}")


@functools.cache
def _first_merges() -> str:
    """SmolLM2's tokenizer, with its first merges and without its added tokens, as JSON."""
    description = json.loads((ensure_checkpoint() / "tokenizer.json").read_text("utf-8"))
    added = {token["content"] for token in description["added_tokens"]}
    model = description["model"]
    by_rank = sorted(model["vocab"].keys() - added, key=model["vocab"].get)[:_VOCAB_SIZE]
    model["vocab"] = {token: index for index, token in enumerate(by_rank)}
    model["merges"] = [pair for pair in model["merges"] if {*pair, "".join(pair)} <= model["vocab"].keys()]
    return json.dumps({**description, "added_tokens": [], "post_processor": None})


def byte_level() -> Tokenizer:
    """Bytes and real merges: what stands before a special token never matters behind it."""
    return Tokenizer.from_str(_first_merges())


def _sentencepiece() -> Tokenizer:
    """A BPE on `▁` for spaces that falls back to bytes, as converted SentencePiece models have it."""
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
    """Spaces become `▁`, and nothing is put before a text."""
    tokenizer = _sentencepiece()
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def llama2_like() -> Tokenizer:
    """A `▁` is put before every stretch of text, behind each special token too."""
    tokenizer = gemma_like()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )
    return tokenizer


def mistral_like() -> Tokenizer:
    """A `▁` is put before the first stretch of text alone: a suffix encoded by itself gets one too many."""
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


def save_tokenizer(pairing: Pairing, folder: Path) -> Any:
    """Write the pairing's model folder. Returns the transformers tokenizer, as the reference."""
    family = pairing.template.family
    backend = TOKENIZERS[pairing.tokenizer]()
    backend.add_special_tokens([_token(text, family, special=True) for text in family.special.split()])
    backend.add_tokens([_token(text, family, special=False) for text in family.plain.split()])
    named = {"eos_token": family.eos, "bos_token": family.bos}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, **{name: text for name, text in named.items() if text is not None}
    )
    fast.chat_template = pairing.template.source
    fast.save_pretrained(folder)
    return fast


def _token(text: str, family: Family, *, special: bool) -> AddedToken:
    return AddedToken(text, special=special, normalized=False, rstrip=text in family.rstrip.split())
