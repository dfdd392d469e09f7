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


def _of_assistant(text: str, others: str = "<|im_end|>") -> str:
    return "{% if m.role == 'assistant' %}" + text + "{% else %}" + others + "{% endif %}"


def _call(**arguments: Any) -> Fields:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"content": "", "tool_calls": [call]}


_USER: Fields = {"role": "user", "content": "new"}
_RESULT: Fields = {"role": "tool", "tool_call_id": "c", "content": "sun"}


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
}  # fmt: skip


@pytest.mark.parametrize("proved", [False, True])
@pytest.mark.parametrize("odd", _ODD.values(), ids=_ODD)
def test_what_is_appended_is_that_of_the_rendering(odd: Odd, proved: bool) -> None:
    tokenizer = tokenizer_with(
        odd.template, special=(*SPECIAL, *odd.special), plain=odd.plain, stops=odd.stops
    )
    if proved:
        tokenizer.prove()
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", **odd.turn}]
    whole = tokenizer.text([*history, odd.new])
    sampled, ids = tokenizer.encode(whole[: whole.index(odd.cut) + len(odd.cut)]), tokenizer.encode(whole)
    assert ids[: len(sampled)] == sampled
    how = odd.how if odd.how.get("stop_reason") is None else {"stop_reason": sampled[-1]}
    if odd.refused:
        with pytest.raises(TemplateUnsupported):
            tokenizer.append(sampled, [odd.new], history=history, **how)
    else:
        assert tokenizer.append(sampled, [odd.new], history=history, **how).prompt_ids == ids
