import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_model import CHATML, END, VOCAB_SIZE, TinyModel
from tokenization import (
    Appended,
    ChatTokenizer,
    InvalidIds,
    InvalidMessages,
    TemplateUnsupported,
    TokenizerUnavailable,
)

Message = dict[str, Any]
_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
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
    "template arguments with names of ours": {
        "template_kwargs": {"finish_reason": "a", "history": 1, "new": 2}
    },
}


def _flat(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same arguments as transformers takes them."""
    others = {name: value for name, value in kwargs.items() if name != "template_kwargs"}
    return {**others, **kwargs.get("template_kwargs", {})}


@pytest.mark.parametrize("kwargs", _KWARGS.values(), ids=_KWARGS)
@pytest.mark.parametrize("turn, new", _SCENARIOS.values(), ids=_SCENARIOS)
def test_append_equals_the_rendering_of_the_whole_history(
    tokenizer: ChatTokenizer, tiny_model: TinyModel, turn: Message, new: list[Message], kwargs: dict[str, Any]
) -> None:
    history = [{"role": "user", "content": "What is the weather?"}, turn]
    before = tiny_model.render(history, **{**_flat(kwargs), "add_generation_prompt": False})
    sampled_to_its_end = before[: len(before) - before[::-1].index(END)]
    out = tokenizer.append(sampled_to_its_end, new, **kwargs)
    assert out.prompt_ids == tiny_model.render([*history, *new], **_flat(kwargs))


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
def test_the_law(tokenizer: ChatTokenizer, prompt: list[int], texts: list[str], thinking: bool) -> None:
    new = [{"role": "user", "content": text} for text in texts]
    out = tokenizer.append(prompt, new, template_kwargs={"enable_thinking": thinking})
    assert out.prompt_ids[: len(prompt)] == prompt
    assert out.prompt_ids[len(prompt) :] == out.close_ids + out.suffix_ids
    assert out.close_ids == ([] if prompt[-1] == END else [END])


def test_a_close_that_was_sampled_is_not_doubled(tokenizer: ChatTokenizer) -> None:
    cut_off, stopped = tokenizer.append([1, 74, 75], _USER), tokenizer.append([1, 74, 75, END], _USER)
    assert cut_off.prompt_ids == stopped.prompt_ids
    assert (cut_off.close_ids, stopped.close_ids) == ([END], [])


def test_what_is_appended_does_not_depend_on_the_prompt(tokenizer: ChatTokenizer) -> None:
    fresh = ChatTokenizer.load(tokenizer.source)
    outs: list[Appended] = [fresh.append(prompt, _USER) for prompt in ([1], [5, END], [300] * 1000)]
    assert len({tuple(out.suffix_ids) for out in outs}) == 1
    info = fresh.cache_info()
    assert (info.hits, info.misses) == (1, 2)  # closed and not closed


@pytest.mark.parametrize(
    "other",
    [
        {"tools": _TOOLS},
        {"add_generation_prompt": False},
        {"template_kwargs": {"enable_thinking": False}},
        {"new_messages": [{"role": "user", "content": "And then??"}]},
        {"new_messages": [{"role": "system", "content": "And then?"}]},
    ],
)
def test_the_cache_tells_suffixes_apart(tokenizer: ChatTokenizer, other: dict[str, Any]) -> None:
    fresh = ChatTokenizer.load(tokenizer.source)
    for _ in range(2):
        fresh.append([1], _USER)
        fresh.append([1], **{"new_messages": _USER, **other})
    assert (fresh.cache_info().hits, fresh.cache_info().misses) == (2, 2)


def test_many_threads_at_once(tokenizer: ChatTokenizer) -> None:
    fresh = ChatTokenizer.load(tokenizer.source)
    texts = [f"number {index % 20} " * (index % 20) for index in range(400)]

    def work(text: str) -> tuple[list[int], list[int]]:
        message = [{"role": "user", "content": text}]
        return fresh.append([1], message).prompt_ids, fresh.render(message)

    expected = {text: work(text) for text in set(texts)}
    fresh = ChatTokenizer.load(tokenizer.source)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, texts)) == [expected[text] for text in texts]


def test_each_thread_has_a_tokenizer_of_its_own(tokenizer: ChatTokenizer) -> None:
    """One that threads share may fail with "Already borrowed"."""
    mine = tokenizer._thread_backend()
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(tokenizer._thread_backend).result() is not mine
    assert tokenizer._thread_backend() is mine


_TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content }}"
_UNSUPPORTED = {
    "continues with 'toolsun'": "{% for m in messages %}{{ m.role + m.content }}{% endfor %}",
    "merge that with the sampled text": (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    ),
    "prints nothing of an assistant turn": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role }}{% if loop.last or m.role != 'assistant' %}"
        "{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    ),
    "details of earlier messages next to the new ones": (
        "{% for m in messages %}"
        + _TURN
        + "{% if not m.tool_calls %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    ),
    "give `history`": (
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ loop.previtem.tool_calls[0].function.name }}{% endif %}"
        + _TURN
        + "{{ '<|im_end|>\n' }}{% endfor %}"
    ),
}


@pytest.mark.parametrize("complaint, template", _UNSUPPORTED.items(), ids=_UNSUPPORTED)
def test_templates_without_a_safe_place(
    with_template: Callable[[str], ChatTokenizer], complaint: str, template: str
) -> None:
    with pytest.raises(TemplateUnsupported, match=complaint):
        with_template(template).append([300], [_result("a", "sun")])


def test_details_of_calls_do_not_matter_where_no_results_follow(
    with_template: Callable[[str], ChatTokenizer],
) -> None:
    printing = with_template(_UNSUPPORTED["give `history`"])
    assert printing.append([1], _USER).close_ids == [END]


def test_a_tool_result_alone_has_its_call_before_it(tokenizer: ChatTokenizer) -> None:
    """The template refuses a result without a call, which is all that a client appends."""
    with pytest.raises(InvalidMessages, match="a tool result without a call"):
        tokenizer.render([_result("a", "sun")])
    assert tokenizer.append([1], [_result("a", "sun")]).close_ids == [END]


def test_stop_id(tokenizer: ChatTokenizer) -> None:
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
def test_what_cannot_be_appended(
    tokenizer: ChatTokenizer, prompt: list[int], messages: list[Message], error: type[Exception]
) -> None:
    with pytest.raises(error):
        tokenizer.append(prompt, messages)


def test_text_that_is_no_unicode(tokenizer: ChatTokenizer) -> None:
    """Models cut surrogate pairs in half when they write the arguments of a call as JSON."""
    half = {"role": "assistant", "content": "a", "tool_calls": [_call("a", '{"face": "\\ud83d"}')]}
    with pytest.raises(InvalidMessages):
        tokenizer.append([1], [*_USER, half])


def test_vocab_size_is_that_of_the_embedding(tokenizer: ChatTokenizer, tiny_model: TinyModel) -> None:
    assert len(tiny_model.reference) < tokenizer.vocab_size == VOCAB_SIZE


def test_token_strings(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.token_strings([END, 74, VOCAB_SIZE - 1]) == ["<|im_end|>", "h", ""]


def test_another_template(with_template: Callable[[str], ChatTokenizer], tokenizer: ChatTokenizer) -> None:
    changed = with_template(CHATML.replace("assistant\n", "assistant"))
    assert changed.render(_USER) == tokenizer.render(_USER)[:-1]


def _empty(folder: Path, model: TinyModel) -> None:
    pass


def _no_template(folder: Path, model: TinyModel) -> None:
    model.reference.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()


def _broken(folder: Path, model: TinyModel) -> None:
    model.reference.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{")


@pytest.mark.parametrize("prepare", [_empty, _no_template, _broken])
def test_what_cannot_be_loaded(
    tmp_path: Path, tiny_model: TinyModel, prepare: Callable[[Path, TinyModel], None]
) -> None:
    prepare(tmp_path, tiny_model)
    with pytest.raises(TokenizerUnavailable, match=str(tmp_path)):
        ChatTokenizer.load(tmp_path)


def test_a_folder_with_a_tokenizer_alone(tmp_path: Path, tiny_model: TinyModel) -> None:
    tiny_model.reference.save_pretrained(tmp_path)
    assert ChatTokenizer.load(tmp_path).vocab_size == len(tiny_model.reference)


def test_truncation_and_padding_of_the_tokenizers_file_are_not_done(
    tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    """Engines encode whole prompts."""
    shutil.copytree(tokenizer.source, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps({**json.loads(file.read_text()), "truncation": cut}))
    text = "longer than four tokens " * 10
    assert ChatTokenizer.load(tmp_path).encode(text) == tokenizer.encode(text)
