"""An append after a template that is not local: the whole history is rendered as text, once or twice."""

from collections.abc import Sequence
from typing import Any

import pytest

from chat_tokenizer import ChatTokenizer, TemplateUnsupported
from chat_tokenizer.history_size import HistorySize
from chat_tokenizer.messages import Message
from chat_tokenizer.proof import Locality, Proof
from chat_tokenizer.renderer import RenderOptions
from chat_tokenizer.turns import Tail, tail_shown
from tests.support.tiny_model import CHATML, END, TinyModel
from tests.support.tiny_templates import HEADER, MESSAGE, chatml
from tests.unit.tokenization.in_memory import appended_text, tokenizer_with

_NUMBERED = CHATML.replace("'<|im_start|>' + message.role", "'<|im_start|>' + message.role ~ loop.index")
_CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"q": "x"}'}}
_CALLED = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
_ANSWERED = {"role": "assistant", "content": "Yes."}


def _history(count: int, turn: dict[str, Any]) -> list[dict[str, Any]]:
    question = {"role": "user", "content": "Well?"}
    return [message for _ in range(count) for message in (question, _ANSWERED)] + [question, turn]


@pytest.mark.parametrize("template, proved", [(CHATML, False), (_NUMBERED, True), (_NUMBERED, False)])
@pytest.mark.parametrize(
    "turn, new",
    [
        (_ANSWERED, [{"role": "user", "content": "1"}, {"role": "user", "content": "12\n"}]),
        # the text of the turn again: its end is found where the turn is
        (_ANSWERED, [{"role": "user", "content": "Yes.<|im_end|>\n<|im_start|>user\n7: Yes."}]),
        (_CALLED, [{"role": "tool", "tool_call_id": "a", "content": " 11: 12"}]),
    ],
)
def test_prompt_equals_a_rendering(
    tiny_model: TinyModel, proved: bool, template: str, turn: dict[str, Any], new: list[dict[str, Any]]
) -> None:
    tokenizer = ChatTokenizer.load(tiny_model.folder, template)
    if proved:
        tokenizer.prove()
    for count in (0, 20):
        history = _history(count, turn)
        ids = tokenizer.render(history, add_generation_prompt=False)
        sampled = ids[: len(ids) - ids[::-1].index(END)]
        appended = tokenizer.append(sampled, new, history=history)
        assert appended.prompt_ids == tokenizer.render([*history, *new])


_FIRST_USER = "{% set ns = namespace(first=true) %}" + chatml(
    "{% if m.role == 'user' and ns.first %}{% set ns.first = false %}[SETTINGS]{% endif %}" + MESSAGE
)
_TRIMS = chatml(
    MESSAGE.replace("m.content", "(m.content | trim if '1' in messages[0].content else m.content)")
)
_COUNTS_ROLES = chatml(after="{{ messages | map(attribute='role') | unique | list | length }}")
_MEASURES = chatml(after="{{ '!' if messages[:-2] | map(attribute='content') | join | length % 3 == 1 }}")
_KINDS = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


@pytest.mark.parametrize("template", [_FIRST_USER, _TRIMS, _COUNTS_ROLES, _MEASURES])
def test_every_history_is_looked_at(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was proved: templates depend on roles, numbers, lengths and digits that no proof tries."""
    tokenizer = tokenizer_with(template)
    tokenizer.prove()
    monkeypatch.setattr(tokenizer._discovery, "proof", Proof(Locality.NEW, Locality.NEW))
    for roles in ("a", "sa", "ta", "ua", "sua", "ssa", "saa", "uuaa", "suata", "uautua"):
        for text in ("1", " b ", "cc"):
            history = [{"role": _KINDS[role], "content": text} for role in roles]
            for new in ("why", " n "):
                messages = [{"role": "user", "content": new}]
                whole = tokenizer.text([*history, *messages])
                rest = whole.split("<|im_end|>", len(history))[-1]
                assert appended_text(tokenizer, "<|im_end|>", messages, history=history) == ("", rest)


_PARTS = (
    "{% for part in m.content if part is mapping %}{% if part.type == 'image' %}"
    "{% set ns.images = ns.images + 1 %}Picture {{ ns.images }}:{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{{ m.content if m.content is string }}{{ '<|im_end|>\n' }}"
)
_NUMBERS_IMAGES = "{% set ns = namespace(images=0) %}" + chatml(HEADER + _PARTS)


def test_images_that_a_template_numbers() -> None:
    """Beyond the size up to which appends are computed, too: one image of a history may exceed it."""
    tokenizer = tokenizer_with(_NUMBERS_IMAGES)
    tokenizer.prove()
    tokenizer._discovery.computed = HistorySize(0, 0)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}}
    history = [{"role": "user", "content": [image]}, {"role": "assistant", "content": "a cat"}]
    new = [{"role": "user", "content": [image, {"type": "text", "text": "and this"}]}]
    _, appended = appended_text(tokenizer, "<|im_end|>", new, history=history)
    assert "Picture 2:and this" in appended
    with pytest.raises(TemplateUnsupported, match="give `history`"):
        tokenizer.append([1], new)


@pytest.mark.parametrize("text", ["Fine", "It's fine"])
def test_end_of_a_list_of_parts_is_not_appended(text: str) -> None:
    """The model writes the text alone. Python prints one with an apostrophe in double quotes."""
    parts = "{{ [{'type': 'text', 'text': m.content}] }}{{ '<|im_end|>\n' }}"
    tokenizer = tokenizer_with(chatml(HEADER + parts))
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
    closed = appended_text(
        tokenizer, text, [{"role": "user", "content": "why"}], history=history, finish_reason="length"
    )
    assert closed[0] == "<|im_end|>"


def test_history_is_rendered_once_where_a_tail_differs_in_numbers(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = ChatTokenizer.load(tiny_model.folder, _NUMBERED)
    questions = [{"role": "user", "content": f"Is it {number}?"} for number in range(20)]
    history = [message for question in questions for message in (question, _ANSWERED)]
    rendered: list[int] = []
    text = tokenizer._template.text

    def counted(messages: Sequence[Message], options: RenderOptions) -> str:
        rendered.append(len(messages))
        return text(messages, options)

    monkeypatch.setattr(tokenizer._template, "text", counted)
    appended = tokenizer.append([END], [{"role": "user", "content": "Why?"}], history=history)
    assert "user41\nWhy?" in tokenizer.decode(appended.suffix_ids)
    assert rendered.count(len(history) + 1) == 1


@pytest.mark.parametrize(
    "alone, ends, turn, whole",
    [
        # the number is part of the close
        (" #2<|user|>new", " #2", "Ok", "Ok #12<|user|>new"),
        (" #2<|user|>new", " #2<|return|>", "Ok", "Ok #12<|user|>new"),
        # the first digit of the number is that of the text
        ("2<|end|><|user|>3: new", "2<|end|>", "1", "112<|end|><|user|>13: new"),
        ("0 <|user|>new", "", "1", "1110 <|user|>new"),
    ],
)
def test_no_tail_is_shown_where_a_number_ends_the_turn(alone: str, ends: str, turn: str, whole: str) -> None:
    guide = Tail(alone, alone.index("new"), ends)
    context = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": turn}]
    assert tail_shown("<|user|>Hi<|assistant|>" + whole, context, guide, "") is None
