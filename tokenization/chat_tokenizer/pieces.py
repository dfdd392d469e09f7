"""Cuts a text where its tokenizer never merges, so that the pieces can be encoded one by one.

Law, for the pieces of any text:

    encode(text) == encode(piece 0) + encode(piece 1) + ...

Encoding takes 100 to 200 times the memory of a text, and cannot be interrupted. In pieces, it takes the
memory for one piece, and the caller can stop it between two pieces.

A text is cut after a letter and before a digit, or before a space or line feed that a letter follows. That is
exact for byte-level BPE with the pre-tokenizers listed here: in each of their expressions

- an alternative that matches the letter continues with letters only, so it ends at the cut;
- an alternative with a lookahead (`\\s+(?!\\S)`) matches white space, and the letter follows it;
- no alternative looks back, so the text after the cut is split as if it were alone.

Other tokenizers (SentencePiece, which merges across words) are not cut.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PIECE = 2**18
"""Approximate number of characters in a piece."""
_LETTERS = r"A-Za-z\u4e00-\u9fa5"
_AFTER = (rf"[ \n][{_LETTERS}]", "[0-9]")
"""Matches the text after a cut."""
_NUMBER_LENGTHS = (r"\p{N}", r"\p{N}{1,3}")
_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_PUNCTUATION = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~]"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Llama 3, Qwen 2 to 3, GLM 4 and others that follow OpenAI's cl100k
_CL100K = [
    rf"{_SUFFIXES}|{_BEFORE_WORD}\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
    for numbers in _NUMBER_LENGTHS
]
# GPT-OSS and others that follow OpenAI's o200k
_O200K = (
    rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_SUFFIXES}?|{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_SUFFIXES}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
)
# DeepSeek V3
_DEEPSEEK = "|".join(
    [
        rf"{_PUNCTUATION}[A-Za-z]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        _END,
    ]
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_EXPRESSIONS = frozenset({*_CL100K, _O200K, _DEEPSEEK, _DEEPSEEK_CJK, *_NUMBER_LENGTHS})


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
class _Model:
    type: str | None = None
    dropout: float | None = None


@dataclass(frozen=True, slots=True)
class Description:
    """The parts of a `tokenizer.json` that tell how it splits, and how it spells tokens."""

    normalizers: list[dict[str, Any]]
    pre_tokenizers: list[dict[str, Any]]
    decoders: list[dict[str, Any]]
    """The steps of its normalizer, its pre-tokenizer and its decoder."""
    added_tokens: list[AddedToken]
    bpe: bool
    """Whether its model is BPE without dropout: equal texts then always have equal ids."""


def read_description(text: str) -> Description:
    """Read the content of a `tokenizer.json`."""
    # not needed to import the package; a third of the time of json, and vocabulary and merges are skipped
    from msgspec import Raw, json

    parts = json.decode(text, type=dict[str, Raw])

    def steps(name: str, members: str) -> list[dict[str, Any]]:
        return _flat(json.decode(parts.get(name, b"null"), type=dict[str, Any] | None), members)

    model = json.decode(parts["model"], type=_Model)
    return Description(
        steps("normalizer", "normalizers"),
        steps("pre_tokenizer", "pretokenizers"),
        steps("decoder", "decoders"),
        json.decode(parts.get("added_tokens", b"[]"), type=list[AddedToken]),
        model.type == "BPE" and not model.dropout,
    )


def _flat(part: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return [step for each in part[members] for step in _flat(each, members)] if members in part else [part]


class Cutter:
    """Cuts texts for one tokenizer."""

    def __init__(self, description: Description) -> None:
        """Determine where texts may be cut; nowhere, unless that is proved to be exact for this tokenizer."""
        self._places = _places(description)

    def pieces(self, text: str) -> Iterator[str]:
        """The pieces of a text. A text that cannot be cut is a single piece."""
        start = 0
        while self._places is not None and len(text) - start > PIECE:
            place = self._places.search(text, start + PIECE)
            if place is None:
                break
            yield text[start : place.start()]
            start = place.start()
        yield text[start:] if start else text


def _places(description: Description) -> re.Pattern[str] | None:
    if not _splits_as_listed(description) or not description.bpe:
        return None
    tokens = description.added_tokens
    # added tokens are found before a text is split: none may cross a cut, or match white space next to it
    if any(not token.plain and re.search(rf"^[{_LETTERS}]|[{_LETTERS}]$", token.content) for token in tokens):
        return None
    texts = [token.content for token in tokens]
    after = [each for each in _AFTER if not any(re.search(f"[{_LETTERS}]{each}", text) for text in texts)]
    return re.compile(f"(?<=[{_LETTERS}])(?={'|'.join(after)})") if after else None


def _splits_as_listed(description: Description) -> bool:
    """Whether the law is proved for the way in which a tokenizer normalises and splits text."""
    if any(step.get("type") != "NFC" for step in description.normalizers):
        return False
    *splits, last = description.pre_tokenizers or [{}]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return False
    return (bool(splits) or bool(last.get("use_regex", True))) and all(map(_is_listed, splits))


def _is_listed(step: dict[str, object]) -> bool:
    if step.get("type") == "Digits":
        return True
    pattern = step.get("pattern")
    expression = str(pattern.get("Regex")) if isinstance(pattern, dict) else ""
    expression = expression.replace("\r", r"\r").replace("\n", r"\n")  # DeepSeek's holds the characters
    return (
        step.get("type") == "Split"
        and step.get("behavior") == "Isolated"
        and not step.get("invert")
        and expression in _EXPRESSIONS
    )
