"""The engine as renderer: appends equal those of its own template, or are refused."""

from collections.abc import Sequence
from typing import Any

import pytest

from chat_tokenizer import ChatTokenizer, TemplateUnsupported
from chat_tokenizer.messages import Message
from chat_tokenizer.renderer import RenderOptions
from chat_tokenizer.turns import PLACEHOLDER_USER
from tests.unit.tokenization.in_memory import token_id, tokenizer_with

_HARMONY = (
    "<|start|>system<|message|>Be good.<|end|>{% for m in messages %}<|start|>{{ m.role }}<|message|>"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }}"
    "{{ c.function.arguments }}{% endfor %}<|end|>{% endfor %}<|start|>assistant<|message|>"
)
"""Prints a message of its own first, and the header of a turn always."""
_SPECIAL = ("<|start|>", "<|message|>", "<|call|>", "<|end|>", "<|return|>")
_CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {"q": "x", "n": None}}}
_CALLED = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
_ANSWERED = {"role": "assistant", "content": "Yes."}
_QUESTION = {"role": "user", "content": "Well?"}
_RESULT = {"role": "tool", "tool_call_id": "a", "content": "17"}
_SYSTEM = {"role": "system", "content": "Brief."}


class _Engine:
    """Renders with a template that the tokenizer does not have."""

    def __init__(self, template: str = _HARMONY) -> None:
        self.inner = tokenizer_with(template, special=_SPECIAL, stops=("<|return|>",))
        self.rendered: list[Sequence[Message]] = []
        self.down = False

    def __call__(self, messages: Sequence[Message], options: RenderOptions) -> list[int]:
        if self.down:
            raise ConnectionError
        self.rendered.append(messages)
        return self.inner.render(messages, tools=options.tools, template_kwargs=options.kwargs)


@pytest.fixture
def engine() -> _Engine:
    return _Engine()


@pytest.fixture
def tokenizer(engine: _Engine) -> ChatTokenizer:
    return _asking(engine)


def _asking(engine: _Engine) -> ChatTokenizer:
    without = tokenizer_with("", special=_SPECIAL, stops=("<|return|>",))
    assert not without.has_template
    return without.rendered_by_engine(engine, b"1")


@pytest.mark.parametrize("proved", [False, True])
@pytest.mark.parametrize(
    "turn, new",
    [
        (_ANSWERED, [_QUESTION]),
        (_ANSWERED, [_SYSTEM, {"role": "user", "content": " And?\n"}]),
        (_CALLED, [_RESULT]),
        (_CALLED, [_RESULT, _QUESTION]),
    ],
)
def test_append_ends_as_the_engines_rendering(
    engine: _Engine, tokenizer: ChatTokenizer, turn: Message, new: list[Message], proved: bool
) -> None:
    """`<|return|>` was sampled where the engine prints `<|end|>`; nothing closes the turn twice."""
    if proved:
        assert tokenizer.prove().complete
    whole = engine.inner.render([_QUESTION, turn, *new])
    appended = tokenizer.append([token_id(tokenizer, "<|return|>")], new, history=[_QUESTION, turn])
    assert appended.close_ids == []
    assert whole[-len(appended.suffix_ids) :] == appended.suffix_ids
    assert whole[-len(appended.suffix_ids) - 1] == token_id(tokenizer, "<|end|>")
    cut = tokenizer.append(tokenizer.encode("}"), new, history=[_QUESTION, turn], finish_reason="length")
    assert cut.suffix_ids == appended.suffix_ids


@pytest.mark.parametrize("arguments", ['{"q":"x","n":1}', r'{"q": "Z\u00fcrich \"a\"" }', '{"n":1}', "{}"])
def test_arguments_that_the_engine_prints_as_they_were_written(arguments: str) -> None:
    """Harmony does. The model's white space and escapes are no condition on the turn's text."""
    engine = _Engine(_HARMONY.replace("function.arguments", "raw"))

    def render(messages: Sequence[Message], options: RenderOptions) -> list[int]:
        return engine([{**each, "tool_calls": _raw(each)} for each in messages], options)

    def _raw(message: Message) -> list[dict[str, Any]]:
        calls = message.get("tool_calls") or ()
        return [{**call, "raw": call["function"]["arguments"]} for call in calls]

    tokenizer = tokenizer_with("", special=_SPECIAL).rendered_by_engine(render, b"1")
    turn = {**_CALLED, "tool_calls": [{**_CALL, "function": {"name": "look", "arguments": arguments}}]}
    appended = tokenizer.append([token_id(tokenizer, "<|end|>")], [_RESULT], history=[_QUESTION, turn])
    whole = render([_QUESTION, turn, _RESULT], RenderOptions())
    assert whole[-len(appended.suffix_ids) :] == appended.suffix_ids


def test_proved_appends_render_no_history(engine: _Engine, tokenizer: ChatTokenizer) -> None:
    tokenizer.prove()
    history = [{"role": "user", "content": "long ago"}, _ANSWERED, _QUESTION, _ANSWERED]

    def rendered(new: Sequence[Message], **options: Any) -> list[int]:
        """The lengths of the conversations that the engine renders for an append."""
        engine.rendered.clear()
        tokenizer.append([65], new, history=history, **options)
        return [len(messages) for messages in engine.rendered]

    assert max(rendered([{"role": "user", "content": "new"}]), default=0) <= 3
    assert rendered([{"role": "user", "content": "new"}]) == []
    # not tried by the proof, because there is no source to read what they change
    for new, options in (
        ([_SYSTEM], {}),
        ([_QUESTION], {"template_kwargs": {"language": "fr"}}),
        ([_RESULT], {}),
    ):
        assert 5 in rendered(new, **options)


@pytest.mark.parametrize(
    "printed, asks",
    [
        ("{{ m.tool_call_id }}{{ m.content }}", False),
        ("{{ m.tool_call_id | length }}{{ m.content }}{{ m.content }}", False),
        ("{{ m.content | trim }}", True),
        ("{{ m.content | replace('1.50', '1.5') }}", True),
        ("{{ m.content }}{{ m.content | length }}", True),
        ("{{ m.content }}{% if '{' in m.content %}json{% endif %}", True),
        ("{{ m.tool_call_id | upper }}", True),
    ],
)
def test_engine_is_not_asked_where_it_prints_new_texts_as_they_are(printed: str, asks: bool) -> None:
    engine = _Engine(_HARMONY.replace("{{ m.content or '' }}", f"{{% if m.content %}}{printed}{{% endif %}}"))
    tokenizer = _asking(engine)

    def asked(number: int, text: str) -> bool:
        call_id = f"call{number:05}"
        called = {**_CALLED, "content": "", "tool_calls": [{**_CALL, "id": call_id}]}
        result = {**_RESULT, "tool_call_id": call_id, "content": text}
        messages = [PLACEHOLDER_USER, called, result, {"role": "user", "content": f" And {number}?\n"}]
        engine.rendered.clear()
        assert tokenizer.text(messages) == engine.inner.text(messages)
        return bool(engine.rendered)

    assert all(asked(number, "17 °C") for number in range(4))
    assert [asked(number, f'\n{{"t": {number}.50}} ') for number in range(4, 6)] == [asks, asks]
    # the text of a special token, and no text
    assert asked(6, "<|end|>") and asked(7, " \n")


def test_text_without_the_engines_ids_is_refused(engine: _Engine, tokenizer: ChatTokenizer) -> None:
    """As where the engine encodes the text of a special token in a message as text."""
    mark, as_text = engine.inner.encode("qqq"), engine.inner.encode("<|")

    def in_parts(messages: Sequence[Message], options: RenderOptions) -> list[int]:
        ids = engine([{**message, "content": "qqq"} for message in messages], options)
        start = next(index for index in range(len(ids)) if ids[index : index + 3] == mark)
        return [*ids[:start], *as_text, *engine.inner.encode("end|>"), *ids[start + 3 :]]

    asking = tokenizer.rendered_by_engine(in_parts, b"2")
    with pytest.raises(TemplateUnsupported, match="does not have its ids"):
        asking.render([{"role": "user", "content": "<|end|>"}])


def test_engine_that_does_not_respond_refuses_nothing_for_ever(
    engine: _Engine, tokenizer: ChatTokenizer
) -> None:
    engine.down = True
    for attempt in (
        lambda: tokenizer.append([65], [_QUESTION], history=[_QUESTION, _ANSWERED]),
        tokenizer.prove,
    ):
        with pytest.raises(ConnectionError):
            attempt()
    engine.down = False
    tokenizer.append([65], [_QUESTION], history=[_QUESTION, _ANSWERED])


def test_new_system_message_needs_the_history(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(TemplateUnsupported, match="history"):
        tokenizer.append([65], [_SYSTEM])


def test_calls_are_sent_as_clients_send_them(engine: _Engine, tokenizer: ChatTokenizer) -> None:
    tokenizer.render([_QUESTION, {**_CALLED, "reasoning_content": "Hm"}, _RESULT])
    (messages,) = engine.rendered
    function = {**_CALL["function"], "arguments": '{"q": "x", "n": null}'}  # type: ignore[dict-item]
    assert messages[1] == {
        "role": "assistant",
        "content": "",
        "reasoning": "Hm",
        "reasoning_content": "Hm",
        "tool_calls": [{**_CALL, "function": function}],
    }


def test_engines_that_render_alike_have_one_fingerprint(engine: _Engine, tokenizer: ChatTokenizer) -> None:
    assert tokenizer.fingerprint == tokenizer.rendered_by_engine(engine, b"1").fingerprint
    assert tokenizer.fingerprint != tokenizer.rendered_by_engine(engine, b"2").fingerprint
