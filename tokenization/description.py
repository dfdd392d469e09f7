"""Reads the parts of a `tokenizer.json` that other modules use."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that the tokenizer finds in a text before any other step."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False

    @property
    def plain(self) -> bool:
        """Whether it matches its own text only, and no white space next to it."""
        return not (self.lstrip or self.rstrip or self.single_word)


@dataclass(frozen=True, slots=True)
class Description:
    """The parts of a `tokenizer.json`."""

    normalizers: list[dict[str, Any]] = field(default_factory=list)
    """The steps of its normalizer."""
    pre_tokenizers: list[dict[str, Any]] = field(default_factory=list)
    """The steps of its pre-tokenizer."""
    decoders: list[dict[str, Any]] = field(default_factory=list)
    """The steps of its decoder."""
    added_tokens: list[AddedToken] = field(default_factory=list)
    vocab: Mapping[str, int] | None = None
    """The tokens, if the model is BPE without dropout: equal texts then always have equal ids."""
    byte_fallback: bool = False


@dataclass(frozen=True, slots=True)
class _Bpe:
    vocab: dict[str, int]
    dropout: float | None = None
    byte_fallback: bool = False


def read_description(text: str) -> Description:
    """Read the content of a `tokenizer.json`."""
    # not needed to import the package; a third of the time of json, and merges are skipped
    from msgspec import Raw, json

    parts = json.decode(text, type=dict[str, Raw])
    normalizer, pre_tokenizer, decoder = (
        json.decode(parts.get(name, b"null"), type=dict[str, Any] | None)
        for name in ("normalizer", "pre_tokenizer", "decoder")
    )
    model = json.decode(parts["model"], type=dict[str, Raw])
    bpe = None
    if json.decode(model.get("type", b"null")) == "BPE":
        bpe = json.decode(parts["model"], type=_Bpe)
    return Description(
        _steps(normalizer, "normalizers"),
        _steps(pre_tokenizer, "pretokenizers"),
        _steps(decoder, "decoders"),
        json.decode(parts.get("added_tokens", b"[]"), type=list[AddedToken]),
        bpe.vocab if bpe and not bpe.dropout else None,
        bpe.byte_fallback if bpe else False,
    )


def _steps(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return [step for each in part[name] for step in _steps(each, name)] if name in part else [part]
