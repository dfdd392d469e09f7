"""Texts that are encoded in pieces have the ids of the whole text, for every pre-tokenizer."""

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers

from chat_tokenizer import encoder
from chat_tokenizer.encoder import Cutter, read_description
from tests.support.templates.vocabularies import VOCABULARIES, byte_level

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _split(expression: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CUT: dict[str, list[dict[str, object]]] = {
    "GPT-2": [{**_BYTES, "use_regex": True}],
    "StarCoder": [{"type": "Digits", "individual_digits": True}, {**_BYTES, "use_regex": True}],
    "Llama 3": [_split(_CL100K), _BYTES],
    "Qwen 3": [_split(_CL100K.replace("{1,3}", "")), _BYTES],
    "GPT-OSS": [_split(_O200K), _BYTES],
    "DeepSeek V3": [_split(r"\p{N}{1,3}"), _split(_CJK), _split(_DEEPSEEK), _BYTES],
}
"""The pre-tokenizers of real tokenizers, as their files spell them."""
_TOKENS = ("<|im_start|>", "<|im_end|>", "user", "s'")


def _tokenizer(steps: list[dict[str, object]], *added: AddedToken, nfc: bool = False) -> Tokenizer:
    description = json.loads(byte_level().to_str())
    description["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in _TOKENS])
    tokenizer.add_tokens(list(added))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _cutter(tokenizer: Tokenizer) -> Cutter:
    return Cutter(read_description(tokenizer.to_str()))


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "PIECE", 3)


_TEXTS = st.lists(
    st.one_of(
        st.sampled_from(["a b", "ab cd", "x12", "it's 5", "word\nword", "\u4e2d\n\u6587"]),
        st.sampled_from([*string.ascii_letters[:4], *_TOKENS, "'", "'s", "'LL", "the ", "1", "23", "4567"]),
        st.sampled_from([" ", "  ", "\n", "\r\n", "\n\n", "\t", "\u00a0", "\u3000", ".", "...", "/", "_"]),
        st.sampled_from(["\u00e9", "e\u0301", "\u0301", "\u0345", "\u0130", "\u017f", "\u1100\u1161"]),
        st.sampled_from(["\u4e2d\u6587", "\u3042", "\U0001f642", "\u200d"]),
        st.characters(codec="utf-8"),
    ),
    min_size=5,
    max_size=60,
).map("".join)


@pytest.mark.parametrize("name", _CUT)
def test_pieces_have_the_ids_of_the_whole_text(name: str) -> None:
    tokenizer = _tokenizer(_CUT[name], nfc=name.startswith("Qwen"))
    cutter = _cutter(tokenizer)
    cuts = 0

    @given(_TEXTS)
    def check(text: str) -> None:
        nonlocal cuts
        cut = list(cutter.pieces(text))
        assert "".join(cut) == text
        ids = [token for piece in cut for token in tokenizer.encode(piece, add_special_tokens=False).ids]
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids
        cuts += len(cut) - 1

    check()
    assert cuts


@pytest.mark.parametrize(
    "tokenizer",
    [
        _tokenizer([{**_BYTES, "add_prefix_space": True, "use_regex": True}]),
        _tokenizer([_BYTES]),
        _tokenizer([_split(r"\s"), _BYTES]),
        _tokenizer([{**_split(_CL100K), "behavior": "Removed"}, _BYTES]),
        _tokenizer(_CUT["Llama 3"], AddedToken("word", rstrip=True)),
        VOCABULARIES["gemma_like"](),
    ],
)
def test_a_tokenizer_that_may_merge_across_a_cut_is_not_cut(tokenizer: Tokenizer) -> None:
    text = "one two three 4 five" * 10
    assert list(_cutter(tokenizer).pieces(text)) == [text]


def test_the_search_for_a_cut_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the GIL; a piece that would be longer is refused. The last place that counts is found."""
    monkeypatch.setattr(encoder, "PIECE", 10)
    monkeypatch.setattr(encoder, "MAX_PIECE", 20)
    cutter = _cutter(_tokenizer(_CUT["Qwen 3"]))
    assert [len(piece) for piece in cutter.pieces("!" * 30 + "a b" * 10)] == [60]
    assert [len(piece) for piece in cutter.pieces("a" * 20 + " b" + "!" * 5)] == [20, 7]
