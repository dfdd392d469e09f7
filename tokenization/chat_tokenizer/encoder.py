"""Text to ids and back, with a private copy of the tokenizer that all threads share.

Invariant: nothing changes the copy after it is created. If one thread changes a `tokenizers.Tokenizer` (its
truncation, padding or added tokens) while another one reads it, version 0.21 fails with "Already borrowed",
and 0.23 encodes with the change. So the copy is private: callers of transformers change its own tokenizer.

A long text is cut where its tokenizer never merges, and encoded in pieces. Law, for the pieces of any text:

    encode(text) == encode(piece 0) + encode(piece 1) + ...

Encoding takes 100 to 200 times the memory of a text, and cannot be interrupted. In pieces, it takes the
memory for one piece, and the caller can stop it between two pieces.

A text is cut after a letter and before a digit, or before a space or line feed that a letter follows. That is
exact for byte-level BPE with the pre-tokenizers listed here: in each of their expressions

- an alternative that matches the letter continues with letters only, so it ends at the cut;
- an alternative with a lookahead (`\\s+(?!\\S)`) matches white space, and the letter follows it;
- no alternative looks back, so the text after the cut is split as if it were alone.

Other tokenizers (SentencePiece, which merges across words) are not cut.

`TokenBytes` is to show ids, never to encode again. Law, for ids of a tokenizer whose decoder changes no token
because of its neighbours:

    b"".join(token_bytes(id) for id in ids) == decode(ids).encode(), where decode(ids) is valid Unicode

A token may hold a part of a character only, so the bytes of one token are not always valid UTF-8.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chat_tokenizer.errors import InvalidMessages, Stopped, TemplateUnsupported, TooManyIds

PIECE = 2**18
"""Approximate number of characters in a piece."""
MAX_PIECE = 2**22
"""Most characters in one call of the tokenizer, which takes 100 to 200 bytes of memory for each."""
_LETTERS = r"A-Za-z\u4e00-\u9fa5"
_AFTER = (rf"[ \n][{_LETTERS}]", "[0-9]")
"""Matches the text after a cut."""
_AHEAD = 2
"""Characters after a cut that these match, at most."""
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
            # a longer piece is refused, and a search holds the GIL for a second per 20 MB
            place = self._places.search(text, start + PIECE, start + MAX_PIECE + _AHEAD)
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


_BYTE = "<0x00>"
_SPACE = "\u2581"
"""What SentencePiece writes in place of a space."""


class TokenBytes:
    """Spells the tokens of one vocabulary. Safe to use from several threads."""

    def __init__(self, description: Description) -> None:
        """Find out what the decoder does with each token."""
        kinds = {step.get("type") for step in description.decoders}
        self._alphabet = byte_alphabet() if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        prefixes = (
            str(step.get("prefix")) for step in description.decoders if step.get("type") == "WordPiece"
        )
        self._continues = next(prefixes, "")
        self._spaces = [space for step in description.decoders if (space := _space_of(step))]

    def of(self, token: str) -> bytes:
        """The bytes of a token, given as the vocabulary spells it. Example: b" caf\\xc3" of "Ġcaf\xc3".

        Decoders do the same with added tokens: those of Gemma that stand for several spaces are spelled "▁▁".
        """
        if self._alphabet is not None and all(character in self._alphabet for character in token):
            return bytes(self._alphabet[character] for character in token)
        if self._byte_fallback and len(token) == len(_BYTE) and token[:3] == _BYTE[:3] and token[-1] == ">":
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        if self._continues:
            begins_word = not token.startswith(self._continues)
            token = f" {token}" if begins_word else token.removeprefix(self._continues)
        for space in self._spaces:
            token = token.replace(space, " ")
        return token.encode("utf-8", "surrogatepass")


def byte_alphabet() -> dict[str, int]:
    """The byte that each character of byte-level BPE stands for.

    Source: `bytes_to_unicode` of GPT-2, openai/gpt-2, src/encoder.py.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _space_of(step: dict[str, Any]) -> str:
    """The text that a step of a decoder replaces by a space; empty if it replaces none."""
    if step.get("type") == "Metaspace":
        return str(step.get("replacement") or _SPACE)
    pattern = step.get("pattern")
    if step.get("type") == "Replace" and step.get("content") == " " and isinstance(pattern, dict):
        return str(pattern.get("String") or "")
    return str(step.get("suffix") or "") if step.get("type") == "BPEDecoder" else ""


@dataclass(frozen=True, slots=True)
class Limit:
    """Ends the tokenising of a text early."""

    max_ids: int | None = None
    """None for no limit."""
    stopped: Callable[[], bool] = bool
    """Returns whether the caller no longer waits; called between the pieces of a long text."""

    def plus(self, more: int) -> "Limit":
        """The limit for a text with `more` ids of context, which do not count."""
        return self if self.max_ids is None else replace(self, max_ids=self.max_ids + more)

    def check(self, count: int, *, at_least: bool = False) -> None:
        """Raise TooManyIds if `count` is over the limit, and Stopped if the caller no longer waits."""
        if self.stopped():
            raise Stopped
        if self.max_ids is not None and count > self.max_ids:
            raise TooManyIds(count, self.max_ids, at_least=at_least)


NO_LIMIT = Limit()


class Encoder:
    """Encodes and decodes with the vocabulary of a `tokenizer.json`. Safe to use from several threads."""

    def __init__(self, description: str) -> None:
        """Parse the content of a `tokenizer.json`. This holds the GIL for about 50 ms per 50,000 tokens.

        So make an encoder where a model is loaded, not in the first request that needs it.
        """
        from tokenizers import Tokenizer  # slow to import, so only when needed

        self.description = description
        self._tokenizer = Tokenizer.from_str(description)
        # a tokenizer.json may enable both; engines encode whole prompts without padding
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        parts = read_description(description)
        self._cutter = Cutter(parts)
        self._token_bytes = TokenBytes(parts)

    # `Tokenizer.encode` and `Tokenizer.decode` hold the GIL; their batch variants release it

    def encode(self, text: str, limit: Limit = NO_LIMIT) -> list[int]:
        """The ids of a text, without BOS or other tokens around it. Releases the GIL.

        Raises:
            InvalidMessages: the text holds half of a surrogate pair.
            TooManyIds: it has more ids than `limit` allows. Most such texts are not tokenised completely.
            Stopped: `limit.stopped` returned True.
            TemplateUnsupported: it is longer than `MAX_PIECE`, and the tokenizer merges across all of it.
        """
        ids: list[int] = []
        for piece in self._cutter.pieces(text):
            if len(piece) > MAX_PIECE:
                raise TemplateUnsupported(
                    f"{len(piece)} characters cannot be cut exactly for this tokenizer, and at most "
                    f"{MAX_PIECE} are tokenised at once: send less text"
                )
            try:
                ids += self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0].ids
            except TypeError as error:  # a lone surrogate: half of a character that was cut in two
                raise InvalidMessages(
                    "the text is not valid Unicode: it holds half of a surrogate pair"
                ) from error
            limit.check(len(ids), at_least=len(piece) < len(text))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, with special tokens. Only read or compare it: encoding it may give other ids.

        Releases the GIL.
        """
        text: str = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=False)[0]
        return text

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The token of each id as the vocabulary spells it; empty for ids without one."""
        return [self._tokenizer.id_to_token(token) or "" for token in ids]

    def token_bytes(self, ids: Iterable[int]) -> dict[int, bytes]:
        """What each of the ids stands for; those without a token are missing. See `TokenBytes`."""
        tokens = {token: self._tokenizer.id_to_token(token) for token in set(ids)}
        return {token: self._token_bytes.of(text) for token, text in tokens.items() if text is not None}
