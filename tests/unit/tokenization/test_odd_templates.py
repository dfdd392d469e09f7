"""Templates that decide in unusual ways what follows a turn: the answer is their rendering's, or refused."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from chat_tokenizer import TemplateUnsupported
from tests.unit.tokenization.in_memory import SPECIAL, tokenizer_with

Fields = dict[str, Any]
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_HEADER = "{{ '<|im_start|>' + m.role + '\n' + m.content }}"
_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.arguments | tojson + '</call>' }}{% endfor %}"
)
_LENGTH, _ABORT = {"finish_reason": "length"}, {"finish_reason": "abort"}


def _loop(body: str, prompt: str = _PROMPT) -> str:
    return "{% for m in messages %}" + body + "{% endfor %}" + prompt


def _noted_if(condition: str) -> str:
    """ChatML with a note before the generation prompt."""
    return _loop(_HEADER + _CALLS + "<|im_end|>\n", "{{ '(note)' if " + condition + " }}" + _PROMPT)


def _of_assistant(text: str, others: str = "<|im_end|>") -> str:
    return "{% if m.role == 'assistant' %}" + text + "{% else %}" + others + "{% endif %}"


def _call(**arguments: Any) -> Fields:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"content": "", "tool_calls": [call]}


_USER: Fields = {"role": "user", "content": "new"}
_RESULT: Fields = {"role": "tool", "tool_call_id": "c", "content": "sun"}
_QUESTION: Fields = {"role": "user", "content": "Hi"}
_EXCHANGE: list[Fields] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
_TOOLS = [{"type": "function", "function": {"name": "f"}}]


@dataclass(frozen=True)
class Odd:
    """A template, a turn, and how much of the rendering was sampled."""

    template: str
    turn: Fields
    cut: str
    """What the sampled text ends with, where that occurs first."""
    new: Fields = field(default_factory=lambda: _USER)
    how: Fields = field(default_factory=dict)
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ("<call>", "</call>")
    stops: tuple[str, ...] = ("<|im_end|>", "<|eos|>")
    refused: bool = False
    before: list[Fields] = field(default_factory=lambda: [_QUESTION])
    """The messages before the turn."""
    options: Fields = field(default_factory=dict)
    """How the conversation is rendered."""


_ROLES = ("<|user|>", "<|assistant|>", "<|tool|>")
_GLM = _loop("{{ '<|' + m.role + '|>' + m.content }}" + _CALLS, "<|assistant|>")
_ODD = {
    "empty turn, and a line feed after content": Odd(
        _loop(_HEADER + _of_assistant("{{ '\n' if m.content }}<|im_end|>") + "\n"),
        {"content": ""}, "assistant\n", how=_ABORT, refused=True,
    ),
    "content beside a call decides the close": Odd(
        _loop(_HEADER + _CALLS + _of_assistant("{{ '' if m.content[-1:] == '.' else '.' }}<|im_end|>")),
        _call(city="Bern") | {"content": "I look."}, "</call><|im_end|>", _RESULT,
    ),
    "a plain token ends the prompt and begins the close": Odd(
        _loop(
            "{{ '<|im_start|>' + m.role + '<sep>' + m.content }}" + _of_assistant("<sep><|im_end|>"),
            "{% if add_generation_prompt %}<|im_start|>assistant<sep>{% endif %}",
        ),
        {"content": ""}, "assistant<sep>", how=_ABORT, plain=("<sep>",), refused=True,
    ),
    "the text of a stop token in a list of arguments": Odd(
        _GLM, _call(city="Bern", notes=["see <|eos|>"]), "</call><|tool|>", _RESULT,
        special=_ROLES, stops=("<|eos|>", "<|user|>", "<|tool|>"),
    ),
    "reasoning after content": Odd(
        _loop(_HEADER + "{{ '[' + m.reasoning + ']' if m.reasoning }}<|im_end|>"),
        {"content": "Fine.", "reasoning": "Hm"}, "[Hm]", how=_LENGTH, refused=True,
    ),
    "the stop token opens messages, after a close": Odd(
        _loop("{{ '<|' + m.role + '|>' + m.content + '<|closed|>\n' }}", "<|assistant|>"),
        {"content": "Fine"}, "Fine<|closed|>\n<|user|>",
        special=(*_ROLES, "<|closed|>"), stops=("<|eos|>", "<|user|>"),
    ),
    "a plain token begins a close that is not always printed": Odd(
        _loop(
            "{{ m.role + ': ' + m.content }}"
            + _of_assistant("{{ '</p><|im_end|>' if not loop.last }}", "</p><|im_end|>"),
            "assistant: ",
        ),
        {"content": "Fine"}, "Fine</p>", how=_LENGTH, plain=("</p>",),
    ),
    "a plain token ends calls and begins the close": Odd(
        _loop(_HEADER + _CALLS + _of_assistant("</call><|im_end|>")),
        _call(city="Bern"), '"}</call>', _RESULT, _LENGTH, refused=True,
    ),
    "the stop token of the request is plain": Odd(
        _loop("{{ m.role + ': ' + m.content }}</turn>\n", "assistant: "),
        {"content": "Fine"}, "Fine</turn>", how={"stop_reason": "last id"}, plain=("</turn>",),
    ),
    "empty turn, and text after the close of others": Odd(
        _loop(_HEADER + _of_assistant("<|im_end|>{{ '\n' if m.content }}")),
        {"content": ""}, "assistant\n<|im_end|>", refused=True,
    ),
    "the name of the turn": Odd(
        _loop(_HEADER + "<|im_end|>{{ '(' + m.name + ')' if m.name }}\n"),
        {"content": "Fine", "name": "ann"}, "Fine<|im_end|>",
    ),
    "text after the stop token of the last turn only": Odd(
        _loop(_HEADER + " END{{ '<|eos|>' if loop.last and m.role == 'assistant' }}"),
        {"content": "Fine<|eos|>"}, "Fine<|eos|>", refused=True,
    ),
    "the number of the turn in its close": Odd(
        _loop(_HEADER + _CALLS + _of_assistant("{{ ' #' ~ loop.index }}<|im_end|>")),
        _call(city="Bern"), "</call>", _RESULT, _LENGTH, refused=True, before=[*_EXCHANGE, _QUESTION],
    ),
    "a number that was sampled with its close": Odd(
        _loop(_HEADER + _CALLS + _of_assistant("{{ ' #' ~ loop.index }}<|im_end|>")),
        _call(city="Bern"), "</call> #4<|im_end|>", _RESULT, before=[*_EXCHANGE, _QUESTION],
    ),
    "text before the stop token of calls only": Odd(
        _loop(_HEADER + _CALLS + _of_assistant("{{ ' DONE' if m.tool_calls }}<|im_end|>")),
        _call(city="Bern"), "</call>", _RESULT, _LENGTH, refused=True,
    ),
    "the token that opens messages closes texts": Odd(
        _loop(
            "{{ '<|im_end|>' + m.role + '<sep>' + m.content }}" + _CALLS
            + "{{ '<|called|>' if m.tool_calls else '<|im_end|>' }}<sep>",
            "{% if add_generation_prompt %}<|im_end|>assistant<sep>{% endif %}",
        ),
        _call(city="Bern"), "</call>", _RESULT, _LENGTH,
        special=("<|called|>", "<sep>"), stops=("<|im_end|>", "<|eos|>", "<|called|>"),
    ),
    "the turn is a number": Odd(
        _loop(_HEADER + "<|im_end|>{{ '!' if m.content.isdigit() and not loop.last }}\n"),
        {"content": "12"}, "12<|im_end|>", refused=True,
    ),
    "the new message is the text of the turn": Odd(
        _loop(
            "{{ '(again)' if m.role == 'user' and not loop.first and m.content == loop.previtem.content }}"
            + _HEADER + "<|im_end|>"
        ),
        {"content": "new"}, "assistant\nnew<|im_end|>", refused=True,
    ),
    "an empty message": Odd(
        _noted_if("messages[0].role == 'user' and not messages[0].content"),
        {"content": "Fine"}, "Fine<|im_end|>", before=[{"role": "user", "content": ""}, *_EXCHANGE[::-1]],
    ),
    "an empty system message": Odd(
        _noted_if("messages[0].role == 'system' and not messages[0].content"),
        {"content": "Fine"}, "Fine<|im_end|>", before=[{"role": "system", "content": ""}, _QUESTION],
    ),
    "a number in a text": Odd(
        _noted_if("messages[0].content | int > 5"),
        {"content": "Fine"}, "Fine<|im_end|>", before=[{"role": "user", "content": "17"}],
    ),
    "a test of letters": Odd(
        _noted_if("messages[0].content is upper"),
        {"content": "Fine"}, "Fine<|im_end|>", before=[{"role": "user", "content": "HI"}],
    ),
    "tools, and no generation prompt": Odd(
        _noted_if("tools and not add_generation_prompt and messages | length > 4"),
        {"content": "Fine"}, "Fine<|im_end|>", before=[*_EXCHANGE, _QUESTION],
        options={"tools": _TOOLS, "add_generation_prompt": False},
    ),
    "an argument, and no generation prompt": Odd(
        _noted_if("noted and not add_generation_prompt and messages | length > 4"),
        {"content": "Fine"}, "Fine<|im_end|>", before=[*_EXCHANGE, _QUESTION],
        options={"template_kwargs": {"noted": True}, "add_generation_prompt": False},
    ),
    "a product": Odd(
        "{% set n = 30 %}" + _noted_if("messages | map(attribute='content') | join | length > 10 * n"),
        {"content": "Fine"}, "Fine<|im_end|>", before=[{"role": "user", "content": "word " * 70}],
    ),
    "a sum": Odd(
        "{% set n = 30 %}" + _noted_if("messages[0].content.split() | length > 20 + n"),
        {"content": "Fine"}, "Fine<|im_end|>", before=[{"role": "user", "content": "word " * 70}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("proved", [False, True])
@pytest.mark.parametrize("odd", _ODD.values(), ids=_ODD)
def test_what_is_appended_is_that_of_the_rendering(odd: Odd, proved: bool) -> None:
    tokenizer = tokenizer_with(
        odd.template, special=(*SPECIAL, *odd.special), plain=odd.plain, stops=odd.stops
    )
    if proved:
        tokenizer.prove()
    history = [*odd.before, {"role": "assistant", **odd.turn}]
    whole = tokenizer.text([*history, odd.new], **odd.options)
    sampled, ids = tokenizer.encode(whole[: whole.index(odd.cut) + len(odd.cut)]), tokenizer.encode(whole)
    assert ids[: len(sampled)] == sampled
    how = odd.how if odd.how.get("stop_reason") is None else {"stop_reason": sampled[-1]}
    how = {**how, **odd.options}
    if odd.refused:
        with pytest.raises(TemplateUnsupported):
            tokenizer.append(sampled, [odd.new], history=history, **how)
    else:
        assert tokenizer.append(sampled, [odd.new], history=history, **how).prompt_ids == ids


def test_without_history_an_argument_is_tried_with_turns_of_each_kind() -> None:
    late = "{{ '(late)' if noted and m.role == 'user' and not loop.first and loop.previtem.tool_calls }}"
    tokenizer = tokenizer_with(_loop(late + _HEADER + _CALLS + "<|im_end|>\n"))
    sampled = tokenizer.encode("<|im_end|>")
    with pytest.raises(TemplateUnsupported, match="give `history`"):
        tokenizer.append(sampled, [_USER], template_kwargs={"noted": True})
