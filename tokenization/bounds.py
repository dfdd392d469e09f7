"""Computes a lower bound for the number of ids of a text without tokenising it.

Law, for every text whose number of ids is bounded:

    Bounds.fewest(text) <= len(encode(text))

Let L(b) be the length of the longest token that holds the byte b. In a token of n bytes each byte has
1 / L(b) <= 1 / n, so these add up to 1 at most, and a text has at least as many ids as the sum of 1 / L(b)
over its bytes. Tokens with letters are shorter than those of white space or rulers (`------`), so English
text is bounded three times as closely as by the longest token alone.
"""

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator

from tokenization.description import Description
from tokenization.token_bytes import byte_alphabet

_SLICE = 2**20
"""Number of bytes or characters that one call counts; other threads run between two calls."""
_EDGE = 16
"""Number of ids by which a slice may be overcounted, for a token that crosses its end."""
_CLASSES = (4, 32, 48)
"""Bytes are counted in classes, by L(b) up to these lengths or beyond them."""
_SHORT = 3
"""Length in characters from which tokens are not examined one by one: any byte may be in such a token."""
_SPACE = b" \t\r\n\x0b\x0c"
_ESCAPE = re.compile(rb"\\.{0,5}", re.DOTALL)
_MAY_COMPOSE = re.compile(rb"[\x00-\x7f]?[\x80-\xff]+")


class Bounds:
    """Lower bounds for the ids of texts with one tokenizer. Safe to use from several threads."""

    def __init__(self, description: Description) -> None:
        """Read the lengths of the tokens. For a tokenizer that may lose text the bound is 0."""
        self._composes = any(step.get("type") == "NFC" for step in description.normalizers)
        lengths = _longest_by_byte(description)
        self._classes: list[tuple[int, bytes]] = []
        """The largest L(b) of a class, and all bytes that are not in it."""
        for shortest, longest in zip((0, *_CLASSES), (*_CLASSES, math.inf), strict=True):
            members = {byte for byte, length in enumerate(lengths) if shortest < length <= longest}
            if members:
                others = bytes(byte for byte in range(256) if byte not in members)
                self._classes.append((max(lengths[byte] for byte in members), others))

    def fewest(self, text: str, enough: float = math.inf) -> int:
        """A lower bound for the ids of a text. Stops counting at more than `enough`."""
        slices = (text[start : start + _SLICE] for start in range(0, len(text), _SLICE))
        return self._fewest((each.encode("utf-8", "surrogatepass") for each in slices), enough)

    def fewest_in_json(self, raw: bytes, enough: float = math.inf) -> int:
        """A lower bound for the ids of a JSON string, without parsing it.

        White space, which a template may strip, and escape sequences are not counted.
        """
        view = memoryview(raw)
        slices = (bytes(view[start : start + _SLICE]) for start in range(0, view.nbytes, _SLICE))
        return self._fewest((_ESCAPE.sub(b"", each).translate(None, _SPACE) for each in slices), enough)

    def _fewest(self, slices: Iterable[bytes], enough: float) -> int:
        total = 0.0
        for data in slices if self._classes else ():
            inert = self._without_composed(data)
            counted = sum(len(inert.translate(None, others)) / length for length, others in self._classes)
            total += max(0.0, counted - _EDGE)
            if total > enough:
                break
        return math.ceil(total)

    def _without_composed(self, data: bytes) -> bytes:
        """Remove the characters that normalisation may join to shorter ones."""
        if not self._composes or data.isascii():
            return data
        normal = unicodedata.is_normalized("NFC", data.decode("utf-8", "ignore"))
        return data if normal else _MAY_COMPOSE.sub(b"", data)


def _longest_by_byte(description: Description) -> list[int]:
    """The length in bytes of the longest token with each byte; 0 for bytes that may become no token."""
    vocab = description.vocab
    if vocab is None or any(step.get("behavior") == "Removed" for step in description.pre_tokenizers):
        return [0] * 256
    alphabet = byte_alphabet()
    if _keeps_bytes(description):
        lengths = _longest(_bytes_of(vocab, alphabet), _SHORT)
        for character in alphabet.keys() - vocab.keys():
            lengths[alphabet[character]] = 0  # SmolLM2 has no token for some bytes, and drops them
    elif _keeps_characters(description) and description.byte_fallback and vocab.keys() >= _BYTES:
        spelled = (token for token in vocab if len(token) > _SHORT)
        # the character that SentencePiece uses for a space stands for a space or for itself
        forms = (form for token in spelled for form in {token, token.replace("\u2581", " ")})
        lengths = _longest((form.encode("utf-8", "surrogatepass") for form in forms), 4 * _SHORT)
    else:
        return [0] * 256
    for token in description.added_tokens:
        content = token.content.encode("utf-8", "surrogatepass")
        for byte in set(content):
            lengths[byte] = max(lengths[byte], len(content))
    if any(token.lstrip or token.rstrip for token in description.added_tokens):
        for byte in _SPACE:
            lengths[byte] = 0
    return lengths


def _keeps_bytes(description: Description) -> bool:
    """Whether a tokenizer works on bytes and loses none, except for those that NFC joins."""
    last = description.pre_tokenizers[-1:] or [{}]
    kinds = {step.get("type") for step in description.pre_tokenizers[:-1]}
    normalizers = {step.get("type") for step in description.normalizers}
    return last[0].get("type") == "ByteLevel" and kinds <= {"Split", "Digits"} and normalizers <= {"NFC"}


def _keeps_characters(description: Description) -> bool:
    """Whether a tokenizer works on characters and loses none, as converted SentencePiece models do."""
    for step in description.normalizers:
        spaces = step.get("pattern") == {"String": " "} and step.get("content") == "\u2581"
        if not (step.get("type") == "Prepend" or (step.get("type") == "Replace" and spaces)):
            return False
    return {step.get("type") for step in description.pre_tokenizers} <= {"Split", "Metaspace"}


_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def _bytes_of(vocab: Iterable[str], alphabet: dict[str, int]) -> Iterator[bytes]:
    for token in vocab:
        if len(token) > _SHORT and alphabet.keys() >= set(token):
            yield bytes(alphabet[character] for character in token)


def _longest(tokens: Iterable[bytes], shortest: int) -> list[int]:
    lengths = [shortest] * 256
    seen = b""
    for token in sorted(tokens, key=len, reverse=True):
        for byte in set(token.translate(None, seen)):
            lengths[byte] = len(token)
            seen += bytes([byte])
    return lengths
