"""The bytes that each token stands for, as its decoder spells them.

Law, for ids of a tokenizer whose decoder changes no token because of its neighbours:

    b"".join(token_bytes(id) for id in ids) == decode(ids).encode(), where decode(ids) is valid Unicode

A token may hold a part of a character only, so the bytes of one token are not always valid UTF-8. To show,
never to encode again.
"""

from typing import Any

from chat_tokenizer.pieces import Description

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
