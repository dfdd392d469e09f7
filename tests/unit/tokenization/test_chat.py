"""A tokenizer that is loaded from a folder: rendering, appending, its cache and its errors."""

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_tokenizer import (
    ChatTokenizer,
    InvalidIds,
    InvalidMessages,
    TemplateUnsupported,
    TokenizerUnavailable,
    UnfinishedTurn,
)
from tests.support.tiny_model import CHATML, END, VOCAB_SIZE, TinyModel

Message = dict[str, Any]
_FUNCTION = {"name": "weather", "description": None, "parameters": {"type": "object"}}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_USER = [{"role": "user", "content": "And then?"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: TinyModel) -> ChatTokenizer:
    return ChatTokenizer.load(tiny_model.folder)


@pytest.fixture
def fresh(tiny_model: TinyModel) -> ChatTokenizer:
    """A tokenizer with an empty cache."""
    return ChatTokenizer.load(tiny_model.folder)


def _result(name: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": name, "content": content}


def _call(name: str, arguments: object) -> Message:
    return {"id": name, "type": "function", "function": {"name": "weather", "arguments": arguments}}


def _turn(content: str, calls: list[Message] | None = None) -> Message:
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


_CALLS = [_call("a", {"city": "Paris"}), _call("b", {"city": "Oslo", "deep": [1, False]})]
_TWO_RESULTS = (_turn("Both.", _CALLS), [_result("a", "sun"), _result("b", "snow, 四 °C")])
_SCENARIOS: dict[str, tuple[Message, list[Message], dict[str, Any]]] = {
    "exchange": (_turn("I see."), [*_USER, _turn("Well.", _CALLS[:1]), _result("a", "x")], {}),
    "two results": (*_TWO_RESULTS, {"tools": _TOOLS}),
    "no generation prompt": (*_TWO_RESULTS, {"add_generation_prompt": False}),
    "template arguments named like parameters of append": (
        *_TWO_RESULTS,
        {"template_kwargs": {"finish_reason": "a", "history": 1, "new": 2}},
    ),
}


@pytest.mark.parametrize("turn, new, kwargs", _SCENARIOS.values(), ids=_SCENARIOS)
def test_append_equals_the_rendering_of_the_whole_history(
    tokenizer: ChatTokenizer, tiny_model: TinyModel, turn: Message, new: list[Message], kwargs: dict[str, Any]
) -> None:
    flat = {name: value for name, value in kwargs.items() if name != "template_kwargs"}
    flat |= kwargs.get("template_kwargs", {})
    history = [{"role": "user", "content": "What is the weather?"}, turn]
    before = tiny_model.render(history, **{**flat, "add_generation_prompt": False})
    # a model samples nothing after its stop token
    up_to_stop = before[: len(before) - before[::-1].index(END)]
    whole = tiny_model.render([*history, *new], **flat)
    assert tokenizer.append(up_to_stop, new, **kwargs).prompt_ids == whole
    assert tokenizer.render([*history, *new], **kwargs) == whole


@given(
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1),
    texts=st.lists(st.text(), min_size=1, max_size=3),
)
def test_given_ids_are_a_prefix_of_the_next_prompt(
    tokenizer: ChatTokenizer, prompt: list[int], texts: list[str]
) -> None:
    given = list(prompt)
    appended = tokenizer.append(given, [{"role": "user", "content": text} for text in texts])
    given += [7]  # the list stays the caller's own
    assert appended.prompt_ids == prompt + appended.close_ids + appended.suffix_ids
    assert appended.close_ids == ([] if prompt[-1] == END else [END])


@pytest.mark.parametrize(
    "difference",
    [
        {"tools": _TOOLS},
        {"add_generation_prompt": False},
        {"template_kwargs": {"enable_thinking": False}},
        {"new_messages": [{"role": "system", "content": "And then?"}]},
    ],
)
def test_cache_key_covers_all_arguments(fresh: ChatTokenizer, difference: dict[str, Any]) -> None:
    for _ in range(2):
        fresh.append([1], _USER)
        fresh.append([1], **{"new_messages": _USER, **difference})
    assert (fresh.cache_info().hits, fresh.cache_info().misses) == (2, 2)
    # not the prompt, except its last id
    appended = [fresh.append(prompt, _USER) for prompt in ([300] * 1000 + [1], [5, END])]
    assert appended[0].suffix_ids == appended[1].suffix_ids
    assert (fresh.cache_info().hits, fresh.cache_info().misses) == (3, 3)


@pytest.mark.parametrize(
    "template, history, error",
    [
        (
            "{% for m in messages %}{{ '<|im_start|>' + m.role }}{% if loop.last or m.role != 'assistant' %}"
            "{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}",
            None,
            "prints nothing of an assistant turn",
        ),
        (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% if m.role == 'tool' %}"
            "{{ loop.previtem.tool_calls[0].function.name }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}",
            None,
            "give `history` .*tool after user 'qw', assistant with calls",
        ),
        (
            "{{ raise_exception('this template refuses all messages') }}",
            [*_USER, _turn("", _CALLS[:1])],
            "refuses all messages",
        ),
    ],
)
def test_refused_append_has_a_reason(tiny_model: TinyModel, template: str, history: Any, error: str) -> None:
    tokenizer = ChatTokenizer.load(tiny_model.folder, template)
    with pytest.raises((TemplateUnsupported, InvalidMessages), match=error):
        tokenizer.append([300], [_result("a", "sun")], history=history)


def test_properties_of_a_tokenizer(tokenizer: ChatTokenizer, tiny_model: TinyModel) -> None:
    assert tokenizer.stop_id(tools=_TOOLS, template_kwargs={"enable_thinking": False}) == END
    # that of the embedding
    assert len(tiny_model.reference) < tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.token_strings([END, 74, VOCAB_SIZE - 1]) == ["<|im_end|>", "h", ""]
    without_line_feed = ChatTokenizer.load(tiny_model.folder, CHATML.replace("assistant\n", "assistant"))
    assert without_line_feed.render(_USER) == tokenizer.render(_USER)[:-1]


_CYCLE: dict[str, Any] = {}
_CYCLE["deep"] = _CYCLE
_DEEP = reduce(lambda inner, _: [inner], range(5_000), list[Any]())


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": []},
        {"new_messages": []},
        {"new_messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        # models sometimes write half of a surrogate pair in the JSON arguments of a call
        {"new_messages": [*_USER, _turn("a", [_call("a", '{"face": "\\ud83d"}')])]},
        {"new_messages": [*_USER, _turn("a", [_call("a", _CYCLE)])]},
        {"new_messages": [*_USER, _turn("a", [_call("a", _DEEP)])]},
        {"history": iter([])},
        {"tools": 5},
        {"template_kwargs": "abc"},
    ],
)
def test_invalid_arguments_of_append_are_typed_errors(
    tokenizer: ChatTokenizer, wrong: dict[str, Any]
) -> None:
    arguments = {"new_messages": _USER, "history": [*_USER, _turn("a")], **wrong}
    with pytest.raises(InvalidIds if "ids" in wrong else InvalidMessages):
        tokenizer.append(arguments.pop("ids", [1]), **arguments)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "chat_template.jinja").unlink(),
        lambda folder: (folder / "tokenizer.json").write_text("{"),
    ],
)
def test_unloadable_tokenizer_raises_unavailable(
    tmp_path: Path, tiny_model: TinyModel, spoil: Callable[[Path], object]
) -> None:
    tiny_model.reference.save_pretrained(tmp_path)
    # a folder without a model's configuration can be loaded
    assert ChatTokenizer.load(tmp_path).vocab_size == len(tiny_model.reference)
    spoil(tmp_path)
    with pytest.raises(TokenizerUnavailable, match=str(tmp_path)):
        ChatTokenizer.load(tmp_path)


def test_a_cut_turn_is_continued_or_rejected(tokenizer: ChatTokenizer) -> None:
    cut: dict[str, Any] = {"finish_reason": "length"}
    continued = tokenizer.append([5, 74], [], **cut, unfinished="continue")
    assert (continued.prompt_ids, continued.close_ids, continued.suffix_ids) == ([5, 74], [], [])
    with pytest.raises(InvalidMessages, match="takes no new messages"):
        tokenizer.append([5, 74], _USER, **cut, unfinished="continue")
    with pytest.raises(UnfinishedTurn, match="length"):
        tokenizer.append([5, 74], _USER, **cut, unfinished="reject")
    closed = tokenizer.append([5, END], _USER, unfinished="reject")
    assert closed.prompt_ids == tokenizer.append([5, END], _USER).prompt_ids
