"""Ids are those of a history if they hold the texts that no model sampled, in order."""

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers

from chat_tokenizer import ChatTokenizer, PrefixMismatch, check_history
from tests.support.talk import call, user
from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_templates import THINKS_AFTER_LAST_USER, chatml

_ONE = {"role": "assistant", "content": "It is 4.", "reasoning_content": "2 and 2"}
_CAFE = unicodedata.normalize("NFD", "Café?")
_PARTS = [{"type": "text", "text": text} for text in (_CAFE, "And this?")]
_CALL = {"role": "assistant", "content": "Let me see.", "tool_calls": [call("c", "look", "{}")]}
_RESULT = {"role": "tool", "tool_call_id": "c", "content": "Sunny in Kyoto"}
_HISTORY: list[dict[str, Any]] = [
    *({"role": "system", "content": "Be brief."}, user("What is 2 + 2?"), _ONE),
    *({"role": "user", "content": _PARTS}, _CALL, _RESULT),
    {"role": "assistant", "content": "Another."},
]


@pytest.fixture(scope="module", params=[chatml(), THINKS_AFTER_LAST_USER, chatml("{{ m.content | upper }}")])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """With a normalizer, as most have."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), request.param).folder
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = normalizers.NFC()
    backend.save(str(folder / "tokenizer.json"))
    return ChatTokenizer.load(folder)


def _ids(tokenizer: ChatTokenizer, history: list[dict[str, Any]]) -> list[int]:
    """The ids of a conversation whose model says something else than the history."""
    said = [{**each, "content": "6789"} if each["role"] == "assistant" else each for each in history]
    return tokenizer.encode(tokenizer.text(said, add_generation_prompt=False))


def test_the_own_ids_of_a_history(tokenizer: ChatTokenizer) -> None:
    for end in range(3, len(_HISTORY) + 1):
        check_history(tokenizer, _ids(tokenizer, _HISTORY[:end]), _HISTORY[:end], [user("more")])


@pytest.mark.parametrize("edited", [0, 1, 3, 5])
def test_an_edited_text(tokenizer: ChatTokenizer, edited: int) -> None:
    history = list(_HISTORY)
    history[edited] = {**history[edited], "content": "I SAID ANOTHER THING"}
    with pytest.raises(PrefixMismatch, match=rf"messages\[{edited}\]"):
        check_history(tokenizer, _ids(tokenizer, _HISTORY), history, [user("more")])


def test_texts_in_another_order(tokenizer: ChatTokenizer) -> None:
    history = [user("FIRST"), _ONE, user("SECOND"), _ONE]
    with pytest.raises(PrefixMismatch):
        check_history(tokenizer, _ids(tokenizer, history), [*history[2:], *history[:2]], [user("more")])


def test_ids_of_an_earlier_turn(tmp_path: Path) -> None:
    """Where a result says nothing, the number of turns tells."""
    tokenizer = ChatTokenizer.load(make_tiny_model(tmp_path, chatml()).folder)
    history = [*_HISTORY[:5], {**_RESULT, "content": ""}, _HISTORY[-1]]
    with pytest.raises(PrefixMismatch, match="turns"):
        check_history(tokenizer, _ids(tokenizer, history[:5]), history, [user("more")])


def test_a_text_that_the_template_escapes(tmp_path: Path) -> None:
    template = chatml("{{ '<|im_start|>' + m.role + '\\n' + m.content | tojson + '<|im_end|>\\n' }}")
    tokenizer = ChatTokenizer.load(make_tiny_model(tmp_path, template).folder)
    history = [user('Say "hi"\nand ü'), _ONE]
    check_history(tokenizer, _ids(tokenizer, history), history, [user("more")])
    with pytest.raises(PrefixMismatch):
        check_history(tokenizer, _ids(tokenizer, history), [user('Say "ho"\nand ü'), _ONE], [user("more")])


def test_a_template_that_refuses_a_conversation_that_ends_with_an_answer(tmp_path: Path) -> None:
    refuse = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer = ChatTokenizer.load(make_tiny_model(tmp_path, refuse + chatml()).folder)
    history = [user("Hi there"), _ONE]
    prompt = tokenizer.text(history[:1]) + "6789<|im_end|>"
    check_history(tokenizer, tokenizer.encode(prompt), history, [user("more")])
    with pytest.raises(PrefixMismatch):
        check_history(tokenizer, tokenizer.encode(prompt), [user("Ho there"), _ONE], [user("more")])
