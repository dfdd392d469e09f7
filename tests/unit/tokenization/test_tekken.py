"""Mistral's `tekken.json` as a fast tokenizer."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from chat_tokenizer import ChatTokenizer, TokenizerUnavailable
from tests.unit.tokenization.in_memory import tokenizer_with

_WORDS = (b"he", b"ll", b"hell", b"o ", b"\xe5\x9b", b"\xe5\x9b\x9b")


def _content(**changes: Any) -> dict[str, Any]:
    tokens = [*(bytes([byte]) for byte in range(256)), *_WORDS, b"not in the vocabulary"]
    config = {
        "pattern": r"\p{L}+|\p{N}|[^\p{L}\p{N}]+",
        "default_num_special_tokens": 30,
        "default_vocab_size": 30 + 256 + len(_WORDS),
    }
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(tokens)
    ]
    return {"config": config, "vocab": vocab, **changes}


def _load(folder: Path, content: dict[str, Any]) -> ChatTokenizer:
    (folder / "tekken.json").write_text(json.dumps(content))
    (folder / "config.json").write_text('{"model_type": "mistral", "vocab_size": 400}')
    return ChatTokenizer.load(folder, needs_template=False)


def test_ids_are_ranks_after_the_special_tokens(tmp_path: Path) -> None:
    tokenizer = _load(tmp_path, _content())
    hell, whole, half = (30 + 256 + _WORDS.index(word) for word in (b"hell", b"\xe5\x9b\x9b", b"ll"))
    # lower ranks merge first; a whole word that is a token is taken as it is
    assert tokenizer.encode("hello") == [hell, 30 + ord("o")]
    assert tokenizer.encode("all") == [30 + ord("a"), half]
    assert tokenizer.encode("四") == [whole]
    assert tokenizer.encode("<s>[INST]hell[/INST]</s>") == [1, 3, hell, 4, 2]
    assert tokenizer.decode([1, whole, 2, 25]) == "<s>四</s><SPECIAL_25>"
    assert (tokenizer.stop_ids, tokenizer.vocab_size, tokenizer.has_template) == (frozenset({2}), 400, False)


def test_special_tokens_are_those_of_the_file(tmp_path: Path) -> None:
    names = ["<unk>", "<s>", "</s>", "[THINK]"]
    content = _content(special_tokens=[{"rank": rank, "token_str": name} for rank, name in enumerate(names)])
    assert _load(tmp_path, content).encode("[THINK]o</s>[INST]")[:3] == [3, 30 + ord("o"), 2]


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnavailable, match="not a vocabulary of Mistral's"):
        _load(tmp_path, {"config": {}})
    with pytest.raises(TokenizerUnavailable, match="has no chat template"):
        _load(tmp_path, _content())
        ChatTokenizer.load(tmp_path)


def test_vocabulary_of_the_template_comes_first_unless_asked(tmp_path: Path) -> None:
    own = tokenizer_with("{{ messages }}")
    (tmp_path / "tokenizer.json").write_text(own._encoder.description)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tekken.json").write_text(json.dumps(_content()))
    assert ChatTokenizer.load(tmp_path).encode("hell") == own.encode("hell")
    asked = ChatTokenizer.load(tmp_path, file="tekken.json", needs_template=False)
    assert (asked.encode("hell"), asked.has_template) == ([30 + 256 + _WORDS.index(b"hell")], False)
    (tmp_path / "tekken.json").unlink()
    with pytest.raises(TokenizerUnavailable, match=r"no tekken\.json"):
        ChatTokenizer.load(tmp_path, file="tekken.json")


@pytest.mark.parametrize("generation", [None, {}, {"eos_token_id": 7}])
@pytest.mark.parametrize("nested", [False, True])
def test_stops_of_the_model_count_where_no_generation_config_has_others(
    tmp_path: Path, generation: dict[str, Any] | None, nested: bool
) -> None:
    """As for GLM, whose tokenizer has one of three, and for models with a `text_config`."""
    stops = {"eos_token_id": [3, 4]}
    _load(tmp_path, _content())
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mistral"} | ({"text_config": stops} if nested else stops))
    )
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    expected = {2, 7} if generation else {2, 3, 4}
    assert ChatTokenizer.load(tmp_path, needs_template=False).stop_ids == expected
