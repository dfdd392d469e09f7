import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny_model import CHATML, END, HI, VOCAB_SIZE, TinyModel
from tokenization import (
    Appended,
    ChatTokenizer,
    InvalidIds,
    InvalidMessages,
    TemplateUnsupported,
    TokenizerUnavailable,
)

Message = dict[str, Any]
_WEATHER = {"name": "weather", "description": None, "parameters": {"type": "object"}}
_TOOLS = [{"type": "function", "function": _WEATHER}]
_USER = [{"role": "user", "content": "And then?"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: TinyModel) -> ChatTokenizer:
    return ChatTokenizer.load(tiny_model.folder)


@pytest.fixture
def with_template(tiny_model: TinyModel) -> Callable[[str], ChatTokenizer]:
    return lambda template: ChatTokenizer.load(tiny_model.folder, template)


def _result(name: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": name, "content": content}


def _call(name: str, arguments: object) -> Message:
    return {"id": name, "type": "function", "function": {"name": "weather", "arguments": arguments}}


_CALLS = [_call("a", {"city": "Paris"}), _call("b", {"city": "Oslo", "deep": [1, False]})]
_SCENARIOS: dict[str, tuple[Message, list[Message]]] = {
    "user": ({"role": "assistant", "content": "I see."}, _USER),
    "system and user": (
        {"role": "assistant", "content": "I see."},
        [{"role": "system", "content": "Be brief."}, *_USER],
    ),
    "one result": (
        {"role": "assistant", "content": "", "tool_calls": _CALLS[:1]},
        [_result("a", '{"sun": true}')],
    ),
    "two results": (
        {"role": "assistant", "content": "Both.", "tool_calls": _CALLS},
        [_result("a", "sun"), _result("b", "snow, 四 °C")],
    ),
    "result and user": (
        {"role": "assistant", "content": "", "tool_calls": _CALLS[:1]},
        [_result("a", "sun"), *_USER],
    ),
    "a whole exchange": (
        {"role": "assistant", "content": "I see."},
        [*_USER, {"role": "assistant", "content": "Well.", "tool_calls": _CALLS[:1]}, _result("a", "x")],
    ),
}
_KWARGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": _TOOLS},
    "no generation prompt": {"add_generation_prompt": False},
    "template argument": {"template_kwargs": {"enable_thinking": False}},
    "template arguments named like parameters of append": {
        "template_kwargs": {"finish_reason": "a", "history": 1, "new": 2}
    },
}


def _flat(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same arguments in the form that transformers takes: template arguments next to the others."""
    rendering = {name: value for name, value in kwargs.items() if name != "template_kwargs"}
    return {**rendering, **kwargs.get("template_kwargs", {})}


@pytest.mark.parametrize("kwargs", _KWARGS.values(), ids=_KWARGS)
@pytest.mark.parametrize("turn, new", _SCENARIOS.values(), ids=_SCENARIOS)
def test_append_equals_the_rendering_of_the_whole_history(
    tokenizer: ChatTokenizer, tiny_model: TinyModel, turn: Message, new: list[Message], kwargs: dict[str, Any]
) -> None:
    history = [{"role": "user", "content": "What is the weather?"}, turn]
    before = tiny_model.render(history, **{**_flat(kwargs), "add_generation_prompt": False})
    # a model samples nothing after its stop token
    up_to_stop = before[: len(before) - before[::-1].index(END)]
    appended = tokenizer.append(up_to_stop, new, **kwargs)
    assert appended.prompt_ids == tiny_model.render([*history, *new], **_flat(kwargs))


@pytest.mark.parametrize("kwargs", _KWARGS.values(), ids=_KWARGS)
@pytest.mark.parametrize("turn, new", _SCENARIOS.values(), ids=_SCENARIOS)
def test_render_equals_transformers(
    tokenizer: ChatTokenizer, tiny_model: TinyModel, turn: Message, new: list[Message], kwargs: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": "Hi"}, turn, *new]
    assert tokenizer.render(messages, **kwargs) == tiny_model.render(messages, **_flat(kwargs))


@given(
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1),
    texts=st.lists(st.text(), min_size=1, max_size=3),
    thinking=st.booleans(),
)
def test_given_ids_are_a_prefix_of_the_next_prompt(
    tokenizer: ChatTokenizer, prompt: list[int], texts: list[str], thinking: bool
) -> None:
    new = [{"role": "user", "content": text} for text in texts]
    appended = tokenizer.append(prompt, new, template_kwargs={"enable_thinking": thinking})
    assert appended.prompt_ids[: len(prompt)] == prompt
    assert appended.prompt_ids[len(prompt) :] == appended.close_ids + appended.suffix_ids
    assert appended.close_ids == ([] if prompt[-1] == END else [END])


def test_sampled_stop_token_is_not_added_again(tokenizer: ChatTokenizer) -> None:
    cut_off, stopped = tokenizer.append([1, 74, 75], _USER), tokenizer.append([1, 74, 75, END], _USER)
    assert cut_off.prompt_ids == stopped.prompt_ids
    assert (cut_off.close_ids, stopped.close_ids) == ([END], [])


def test_list_given_to_append_may_be_extended_before_the_prompt_is_read(tokenizer: ChatTokenizer) -> None:
    given = [1, 74, 75, END]
    expected = tokenizer.append(list(given), _USER).prompt_ids
    appended = tokenizer.append(given, _USER)
    given += appended.suffix_ids
    assert appended.prompt_ids == expected == given


def test_suffix_does_not_depend_on_the_prompt(tokenizer: ChatTokenizer) -> None:
    fresh = ChatTokenizer.load(tokenizer.source)
    all_appended: list[Appended] = [fresh.append(prompt, _USER) for prompt in ([1], [5, END], [300] * 1000)]
    assert len({tuple(appended.suffix_ids) for appended in all_appended}) == 1
    info = fresh.cache_info()
    assert (info.hits, info.misses) == (1, 2)  # with the stop token and without it


@pytest.mark.parametrize(
    "difference",
    [
        {"tools": _TOOLS},
        {"add_generation_prompt": False},
        {"template_kwargs": {"enable_thinking": False}},
        {"new_messages": [{"role": "user", "content": "And then??"}]},
        {"new_messages": [{"role": "system", "content": "And then?"}]},
    ],
)
def test_cache_key_covers_all_arguments(tokenizer: ChatTokenizer, difference: dict[str, Any]) -> None:
    fresh = ChatTokenizer.load(tokenizer.source)
    for _ in range(2):
        fresh.append([1], _USER)
        fresh.append([1], **{"new_messages": _USER, **difference})
    assert (fresh.cache_info().hits, fresh.cache_info().misses) == (2, 2)


def test_threads_share_a_tokenizer(tokenizer: ChatTokenizer) -> None:
    fresh = ChatTokenizer.load(tokenizer.source)
    texts = [f"number {index % 20} " * (index % 20) for index in range(400)]

    def work(text: str) -> tuple[list[int], list[int]]:
        message = [{"role": "user", "content": text}]
        return fresh.append([1], message).prompt_ids, fresh.render(message)

    expected = {text: work(text) for text in set(texts)}
    fresh = ChatTokenizer.load(tokenizer.source)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, texts)) == [expected[text] for text in texts]


def test_truncation_set_on_the_transformers_tokenizer_is_ignored(tiny_model: TinyModel) -> None:
    """Encoding uses a private copy: callers of transformers may set truncation and padding of its own one."""
    fresh = ChatTokenizer.load(tiny_model.folder)
    text = "longer than four tokens " * 10
    ids = fresh.encode(text)
    fresh._tokenizer.backend_tokenizer.enable_truncation(4)
    assert fresh.encode(text) == ids


_TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content }}"
_UNSUPPORTED = {
    "prints nothing of an assistant turn": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role }}{% if loop.last or m.role != 'assistant' %}"
        "{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    ),
    "give `history` .the last turn decides what is printed: user after .* assistant with calls": (
        "{% for m in messages %}"
        + _TURN
        + "{% if not m.tool_calls %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    ),
    "give `history` .*tool after user 'qw', assistant with calls": (
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ loop.previtem.tool_calls[0].function.name }}{% endif %}"
        + _TURN
        + "{{ '<|im_end|>\n' }}{% endfor %}"
    ),
}


@pytest.mark.parametrize("error, template", _UNSUPPORTED.items(), ids=_UNSUPPORTED)
def test_template_without_a_safe_place_to_append_is_refused(
    with_template: Callable[[str], ChatTokenizer], error: str, template: str
) -> None:
    with pytest.raises(TemplateUnsupported, match=error):
        with_template(template).append([300], [_result("a", "sun")])


@pytest.mark.parametrize(
    "template, text",
    [
        ("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", "toolsun"),
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}", "\ntool: sun\n"),
    ],
)
@pytest.mark.parametrize("last_id", [300, HI[1], END])
def test_text_without_a_token_at_its_start_is_encoded_alone(
    with_template: Callable[[str], ChatTokenizer], template: str, text: str, last_id: int
) -> None:
    """The sampled ids are fixed, so nothing is merged with them."""
    tokenizer = with_template(template)
    appended = tokenizer.append([last_id], [_result("a", "sun")])
    assert appended.prompt_ids == [last_id, *tokenizer.encode(text)]
    assert appended.close_ids == []


def _never(*_arguments: object, **_options: object) -> str:
    raise AssertionError("rendered")


@pytest.mark.parametrize("template", _UNSUPPORTED.values(), ids=_UNSUPPORTED)
def test_repeated_refused_append_renders_nothing(
    with_template: Callable[[str], ChatTokenizer], monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    tokenizer = with_template(template)
    with pytest.raises(TemplateUnsupported) as first:
        tokenizer.append([300], [_result("a", "sun")])
    monkeypatch.setattr(tokenizer._tokenizer, "apply_chat_template", _never)
    with pytest.raises(TemplateUnsupported) as second:
        tokenizer.append([300], [_result("a", "sun")])
    assert str(second.value) == str(first.value)


def test_repeated_append_to_a_refused_history_renders_nothing(
    with_template: Callable[[str], ChatTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = with_template("{{ raise_exception('this template refuses all messages') }}")
    history: list[Message] = [*_USER, {"role": "assistant", "content": "Both."}]
    for _ in range(2):
        with pytest.raises(InvalidMessages, match="refuses all messages"):
            tokenizer.continuation(END, _USER, history=history)
        monkeypatch.setattr(tokenizer._tokenizer, "apply_chat_template", _never)


def test_repeated_append_that_needs_history_renders_nothing(
    with_template: Callable[[str], ChatTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The placeholders of a history are refused, because the first message is printed next to the result.

    That is cached, and so is the tail with the real history.
    """
    tokenizer = with_template(
        "{% for m in messages %}"
        + _TURN
        + "{% if m.role == 'tool' %}{{ messages[0].content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    )
    history: list[Message] = [*_USER, {"role": "assistant", "content": "", "tool_calls": _CALLS[:1]}]
    first = tokenizer.continuation(END, [_result("a", "sun")], history=history)
    monkeypatch.setattr(tokenizer._tokenizer, "apply_chat_template", _never)
    assert tokenizer.continuation(END, [_result("a", "sun")], history=history) == first


def test_history_is_not_needed_where_no_tool_results_follow(
    with_template: Callable[[str], ChatTokenizer],
) -> None:
    # this template prints the name of a call next to its result
    tokenizer = with_template(list(_UNSUPPORTED.values())[-1])
    assert tokenizer.append([1], _USER).close_ids == [END]


def test_tool_result_is_rendered_after_a_placeholder_call(tokenizer: ChatTokenizer) -> None:
    """The template refuses a result without a call, but a client appends the result alone."""
    with pytest.raises(InvalidMessages, match="a tool result without a call"):
        tokenizer.render([_result("a", "sun")])
    assert tokenizer.append([1], [_result("a", "sun")]).close_ids == [END]


def test_stop_id_is_the_token_that_closes_a_turn(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.stop_id(tools=_TOOLS, template_kwargs={"enable_thinking": False}) == END


@pytest.mark.parametrize(
    "prompt, messages, error",
    [
        ([], _USER, InvalidIds),
        ([1], [], InvalidMessages),
        ([1], [{"role": "nobody", "content": "a"}], InvalidMessages),
        ([1], [{"role": "user", "content": [{"type": "image_url"}]}], InvalidMessages),
    ],
)
def test_invalid_arguments_of_append_raise_their_error(
    tokenizer: ChatTokenizer, prompt: list[int], messages: list[Message], error: type[Exception]
) -> None:
    with pytest.raises(error):
        tokenizer.append(prompt, messages)


def test_half_of_a_surrogate_pair_is_rejected(tokenizer: ChatTokenizer) -> None:
    """Models sometimes write half of a surrogate pair in the JSON arguments of a call."""
    turn = {"role": "assistant", "content": "a", "tool_calls": [_call("a", '{"face": "\\ud83d"}')]}
    with pytest.raises(InvalidMessages):
        tokenizer.append([1], [*_USER, turn])


def test_vocab_size_is_that_of_the_embedding(tokenizer: ChatTokenizer, tiny_model: TinyModel) -> None:
    assert len(tiny_model.reference) < tokenizer.vocab_size == VOCAB_SIZE


def test_token_strings_are_empty_for_ids_without_a_token(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.token_strings([END, 74, VOCAB_SIZE - 1]) == ["<|im_end|>", "h", ""]


def test_chat_template_argument_replaces_the_template(
    with_template: Callable[[str], ChatTokenizer], tokenizer: ChatTokenizer
) -> None:
    without_line_feed = with_template(CHATML.replace("assistant\n", "assistant"))
    assert without_line_feed.render(_USER) == tokenizer.render(_USER)[:-1]


def _empty(folder: Path, model: TinyModel) -> None:
    pass


def _no_template(folder: Path, model: TinyModel) -> None:
    model.reference.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()


def _broken(folder: Path, model: TinyModel) -> None:
    model.reference.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{")


@pytest.mark.parametrize("prepare", [_empty, _no_template, _broken])
def test_unloadable_tokenizer_raises_unavailable(
    tmp_path: Path, tiny_model: TinyModel, prepare: Callable[[Path, TinyModel], None]
) -> None:
    prepare(tmp_path, tiny_model)
    with pytest.raises(TokenizerUnavailable, match=str(tmp_path)):
        ChatTokenizer.load(tmp_path)


def test_folder_without_model_config_can_be_loaded(tmp_path: Path, tiny_model: TinyModel) -> None:
    tiny_model.reference.save_pretrained(tmp_path)
    assert ChatTokenizer.load(tmp_path).vocab_size == len(tiny_model.reference)


def test_truncation_in_the_tokenizer_file_is_ignored(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    """Engines encode prompts without truncation."""
    shutil.copytree(tokenizer.source, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps({**json.loads(file.read_text()), "truncation": truncation}))
    text = "longer than four tokens " * 10
    assert ChatTokenizer.load(tmp_path).encode(text) == tokenizer.encode(text)
