"""A text never has fewer ids than its bound."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers

from tests.support.templates.vocabularies import VOCABULARIES, byte_level
from tokenization import bounds
from tokenization.bounds import Bounds
from tokenization.description import read_description


def _bounds(tokenizer: Tokenizer) -> Bounds:
    return Bounds(read_description(tokenizer.to_str()))


def _with_nfc() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


_TOKENIZERS = {**VOCABULARIES, "NFC": _with_nfc}
_TEXTS = st.lists(
    st.tuples(
        st.one_of(
            st.sampled_from(["the ", "weather", " ", "\n", "=", "1", "e\u0301", "\u2581", "\u4e2d"]),
            st.sampled_from(["\u1100\u1161\u11a8", "\u03b1\u0313\u0300\u0345", "<|im_end|>", '"', "\\"]),
            st.characters(codec="utf-8"),
        ),
        st.integers(1, 40),
    ).map(lambda pair: pair[0] * pair[1]),
    max_size=20,
).map("".join)


@pytest.mark.parametrize("name", _TOKENIZERS)
@pytest.mark.parametrize("slice_size", [7, 2**20])
def test_the_bound_is_no_more_than_the_number_of_ids(
    name: str, slice_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "_SLICE", slice_size)
    monkeypatch.setattr(bounds, "_EDGE", 0 if slice_size > 1000 else bounds._EDGE)  # one slice has no edge
    tokenizer = _TOKENIZERS[name]()
    tokenizer.add_special_tokens(["<|im_end|>"])
    bound = _bounds(tokenizer)

    @given(_TEXTS)
    def check(text: str) -> None:
        count = len(tokenizer.encode(text, add_special_tokens=False).ids)
        assert bound.fewest(text) <= count
        assert bound.fewest_in_json(json.dumps(text).encode()[1:-1]) <= count
        assert bound.fewest_in_json(json.dumps(text, ensure_ascii=False).encode()[1:-1]) <= count

    check()


def test_white_space_that_a_template_or_an_added_token_may_strip_is_not_counted() -> None:
    tokenizer = byte_level()
    for blanks in (b" ", rb"\n"):
        assert _bounds(tokenizer).fewest_in_json(blanks * 10_000) == 0
    tokenizer.add_tokens([AddedToken("<end>", rstrip=True)])
    assert _bounds(tokenizer).fewest("<end>" + " " * 10_000) <= len(tokenizer.encode("<end>").ids)


def test_a_tokenizer_that_may_lose_text_has_no_bound() -> None:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Strip()
    assert _bounds(tokenizer).fewest("a" * 10_000) == 0
    words = json.loads(byte_level().to_str())
    words["model"] = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    assert Bounds(read_description(json.dumps(words))).fewest("a" * 10_000) == 0
