"""The bytes of tokens join to what the tokenizer decodes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from chat_tokenizer.encoder import Encoder, TokenBytes, read_description
from tests.support.templates.vocabularies import VOCABULARIES

_PARTS = st.sampled_from(
    ["the ", "weather", " ", "\n", "\t", "café", "四", "🙂", "é", "\u2581", "<|im_end|>", '{"a": 1}']
)
_TEXTS = st.lists(st.one_of(_PARTS, st.characters(codec="utf-8")), max_size=30).map("".join)


def _encoder(name: str, added: str = "<|im_end|>") -> Encoder:
    backend: Tokenizer = VOCABULARIES[name]()
    backend.add_tokens([AddedToken(added, normalized=False)])
    return Encoder(backend.to_str())


_ENCODERS = {name: _encoder(name) for name in VOCABULARIES}


@pytest.mark.parametrize("name", VOCABULARIES)
@given(text=_TEXTS)
def test_the_bytes_of_ids_join_to_their_text(name: str, text: str) -> None:
    encoder = _ENCODERS[name]
    ids = encoder.encode(text)
    spelled = encoder.token_bytes(ids)
    joined = b"".join(spelled[token] for token in ids).decode("utf-8", "replace")
    decoded = encoder.decode(ids)
    # the decoder of SentencePiece drops the space that its normaliser puts before a text
    assert joined == decoded or (joined.startswith(" ") and joined[1:] == decoded)


_REPLACE = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
_FALLBACK = {"type": "Sequence", "decoders": [_REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]}


@pytest.mark.parametrize(
    "decoder, token, expected",
    [
        ({"type": "ByteLevel"}, "Ġcaf\u00c3", b" caf\xc3"),
        (_FALLBACK, "<0xE2>", b"\xe2"),
        ({"type": "Metaspace", "replacement": "\u2581"}, "\u2581a\u2581b", b" a b"),
        ({"type": "WordPiece", "prefix": "##"}, "sing", b" sing"),
        ({"type": "BPEDecoder", "suffix": "</w>"}, "end</w>", b"end "),
    ],
)
def test_each_decoder(decoder: object, token: str, expected: bytes) -> None:
    model = {"type": "BPE", "vocab": {}, "merges": []}
    described = json.dumps({"decoder": decoder, "added_tokens": [], "model": model})
    assert TokenBytes(read_description(described)).of(token) == expected
