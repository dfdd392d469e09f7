"""Where the text after a turn is cut, for each way in which a turn ends."""

from typing import Any

import pytest

from chat_tokenizer import ChatTokenizer, TemplateUnsupported
from tests.support.templates.vocabularies import gemma_like, llama2_like, mistral_like
from tests.unit.tokenization.in_memory import SPECIAL, appended_text, token_id, tokenizer_with

_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    + _PROMPT
)
_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.arguments | tojson + '</tool_call>' }}"
    "{% endfor %}"
)
_HERMES = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    + _CALLS
    + "{{ '<|im_end|>\n' }}{% endfor %}"
    + _PROMPT
)
# no close: the token of the next role ends a turn
_GLM = (
    "{% for m in messages %}{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}"
    "{{ '\n' + m.content }}"
    + _CALLS
    + "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_GLM_TOKENS = ("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<|eos|>")
# earlier turns end with another token than the last one
_GPTOSS = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '<|message|>' }}{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function.arguments | tojson + '<|call|>' }}{% else %}{{ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
_GPTOSS_TOKENS = ("<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
_TWO_TOKENS = _CHATML.replace("m.content + '<|im_end|>\n'", "m.content + '<|answered|><|im_end|>'")
_PLAIN_CLOSE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + ' END<|im_end|>' }}{% endfor %}assistant: "
)
# a token for each role, and a close
_HEADER = "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|im_end|>' }}{% endfor %}"
_BOTH = (
    "{% for m in messages %}{{ '<|im_end|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_end|>assistant\n' }}{% endif %}"
)

# a message of the template's own before each first one, as Kimi K3 prints it
_ANNOUNCED = "{{ '<|im_start|>system\nYes.<|answered|><|im_end|>' }}" + _TWO_TOKENS
# turns with calls end with a stop token; EOS follows each turn that is not the last
_EOS_AFTER = _CHATML.removesuffix(_PROMPT).replace(
    " + '<|im_end|>\n' }}",
    "}}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}"
    "{% if m.role == 'assistant' %}{{ ' END' + ('<|called|>' if m.tool_calls else '') }}"
    "{{ '' if loop.last else '<|eos|>' }}{% endif %}",
)
# calls end with another token than texts, as in HyperCLOVAX
_OTHER_STOP = (
    "{{ '<|im_start|>system\nYes.<|im_end|>' }}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson + '<|im_end|><|called|>' }}"
    "{% else %}{{ '<|im_end|>' + ('<|answered|>' if m.role == 'assistant' else '') }}{% endif %}{% endfor %}"
    + _PROMPT
)
# a prompt ends with a token that also stands twice in a close, as in Kimi K3
_REPEATED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|sep|>' + m.content }}"
    "{{ '<|sep|>message<|sep|><|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|sep|>' }}{% endif %}"
)

# all but the last message are closed, and white space follows each
_BETWEEN = _CHATML.replace("'<|im_end|>\n'", "('' if loop.last else '<|im_end|>') + '\n'")
# more white space after calls than after texts
_BLANKS = _HERMES.replace("'</tool_call>'", "'</tool_call>    '").replace("'<|im_end|>", "'  <|im_end|>")
# a message of its own, and no header after the last one
_OWN = (
    "<|im_start|>Be good.<|im_end|>{% for m in messages %}"
    "{{ '<|user|>' if m.role == 'user' else '<|asst|>' }}{{ m.content + '<|im_end|>' }}{% endfor %}"
)


def _user(content: str = "And?") -> dict[str, Any]:
    return {"role": "user", "content": content}


def _turn(**fields: Any) -> list[dict[str, Any]]:
    return [_user("Hi"), {"role": "assistant", "content": "Hello.", **fields}]


def _turn_with_calls() -> list[dict[str, Any]]:
    call = {"id": "c0", "type": "function", "function": {"name": "f", "arguments": {"q": "x"}}}
    return _turn(content="", tool_calls=[call])


_REFUSAL = {"type": "refusal", "refusal": "no"}
_RESULT = {"role": "tool", "tool_call_id": "c0", "content": "sun"}
_CHATML_REST = "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
_HERMES_REST = "\n<|im_start|>tool\nsun<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, ChatTokenizer]:
    tools = ("<tool_call>", "</tool_call>")
    return {
        "chatml": tokenizer_with(_CHATML),
        # a line feed that is a token, as in Gemma 3
        "line feed": tokenizer_with(_CHATML.replace("m.content + '<", "m.content + '\n<"), plain=["\n"]),
        "stripped": tokenizer_with(_CHATML.replace("m.content + '<", "m.content | trim + '\n<")),
        "hermes": tokenizer_with(_HERMES, plain=tools),
        "hermes with stops": tokenizer_with(_HERMES, plain=tools, stops=["<|im_end|>", "</tool_call>"]),
        "glm": tokenizer_with(
            _GLM, special=_GLM_TOKENS, plain=tools, stops=["<|user|>", "<|observation|>", "<|eos|>"]
        ),
        "gptoss": tokenizer_with(_GPTOSS, special=_GPTOSS_TOKENS, stops=["<|return|>", "<|call|>"]),
        "two tokens": tokenizer_with(_TWO_TOKENS, special=[*SPECIAL, "<|answered|>"]),
        "header": tokenizer_with(_HEADER, special=[*SPECIAL, "<|user|>"], stops=["<|im_end|>", "<|user|>"]),
        "both": tokenizer_with(_BOTH),
        "announced": tokenizer_with(_ANNOUNCED, special=[*SPECIAL, "<|answered|>"]),
        "other stop": tokenizer_with(
            _OTHER_STOP,
            special=[*SPECIAL, "<|answered|>", "<|called|>"],
            stops=["<|eos|>", "<|answered|>", "<|called|>"],
        ),
        "between": tokenizer_with(_BETWEEN),
        "blanks": tokenizer_with(_BLANKS, plain=tools),
        "own": tokenizer_with(_OWN, special=[*SPECIAL, "<|user|>", "<|asst|>"]),
        "EOS after": tokenizer_with(
            _EOS_AFTER, special=[*SPECIAL, "<|called|>"], stops=["<|eos|>", "<|called|>"]
        ),
        "line feed after calls": tokenizer_with(
            _GLM.replace("+ '</tool_call>'", "+ '</tool_call>\n'"),
            special=_GLM_TOKENS,
            plain=tools,
            stops=["<|eos|>"],
        ),
        "repeated": tokenizer_with(_REPEATED, special=[*SPECIAL, "<|sep|>"]),
    }


_GPTOSS_USER = "<|start|>user<|message|>And?<|end|><|start|>assistant"
_GPTOSS_RESULT = "<|start|>tool<|message|>sun<|end|><|start|>assistant"
_GLM_USER, _GLM_RESULT = "\nAnd?<|assistant|>\n", "\nsun<|assistant|>\n"
_TWO_REST = "<|im_start|>user\nAnd?<|answered|><|im_end|><|im_start|>assistant\n"
_HEADER_REST = "\nAnd?<|im_end|>"
_BOTH_REST = "<|im_end|>user\nAnd?<|im_end|><|im_end|>assistant\n"
_OTHER_REST = "<|im_start|>user\nAnd?<|im_end|><|im_start|>assistant\n"
_OTHER_RESULT = "<|im_start|>tool\nsun<|im_end|><|im_start|>assistant\n"
_BLANKS_REST = _HERMES_REST.replace("<|im_end|>", "  <|im_end|>")
_BETWEEN_REST = _CHATML_REST.replace("<|im_end|>", "")
_REPEATED_REST = "<|im_start|>user<|sep|>And?<|sep|>message<|sep|><|im_end|><|im_start|>assistant<|sep|>"
_LENGTH = {"finish_reason": "length"}

Row = tuple[str, str, dict[str, Any], str, str]
"""A tokenizer, the text sampled last, how it ended; the texts of close and suffix."""
_AFTER_TEXT: dict[str, Row] = {
    "own stop": ("chatml", "<|im_end|>", {}, "", _CHATML_REST),
    "length": ("chatml", "o", _LENGTH, "<|im_end|>", _CHATML_REST),
    "alternate stop": ("chatml", "<|eos|>", {}, "", _CHATML_REST),
    "stop that opens the next message": ("header", "<|user|>", {}, "", "<|user|>" + _HEADER_REST),
    "close before a header": ("header", "<|im_end|>", {}, "", "<|user|>" + _HEADER_REST),

    "one token for both, as length": ("both", "o", _LENGTH, "<|im_end|>", _BOTH_REST),
    "line feed, as length": (
        "line feed", "\n", _LENGTH, "\n<|im_end|>", _CHATML_REST.replace("And?", "And?\n")
    ),
    "line feed that the template strips, as length": (
        "stripped", "\n", _LENGTH, "\n<|im_end|>", _CHATML_REST.replace("And?", "And?\n")
    ),
    "no close": ("glm", "<|user|>", {}, "", _GLM_USER),
    "no close, as length": ("glm", "o", _LENGTH, "", "<|user|>" + _GLM_USER),

    "replaced stop, length": ("gptoss", "o", _LENGTH, "<|end|>", _GPTOSS_USER),
    "first token of a close": ("two tokens", "<|answered|>", {}, "<|im_end|>", _TWO_REST),
    "no token of a close": ("two tokens", "o", _LENGTH, "<|answered|><|im_end|>", _TWO_REST),
    "alternate stop for two tokens": ("two tokens", "<|eos|>", {}, "", _TWO_REST),
    "after a message of the template, alternate stop": ("announced", "<|eos|>", {}, "", _TWO_REST),
    "text with the other stop": ("other stop", "<|answered|>", {}, "", _OTHER_REST),
    "close between messages": ("between", "<|im_end|>", {}, "", _BETWEEN_REST),
    "close between messages, alternate stop": ("between", "<|eos|>", {}, "", _BETWEEN_REST),
    "own message without a header at the end": ("own", "<|eos|>", {}, "", "<|user|>And?<|im_end|>"),
    "own message, as length": ("own", "o", _LENGTH, "<|im_end|>", "<|user|>And?<|im_end|>"),
    "a token twice in the close": (
        "repeated", "o", _LENGTH, "<|sep|>message<|sep|><|im_end|>", _REPEATED_REST
    ),

}  # fmt: skip
_AFTER_CALLS: dict[str, Row] = {
    "call": ("hermes", "<|im_end|>", {}, "", _HERMES_REST),
    "call that stops with its syntax": ("hermes with stops", "</tool_call>", {}, "<|im_end|>", _HERMES_REST),
    "no close, call": ("glm", "<|observation|>", {}, "", _GLM_RESULT),
    "no close, call as length": ("glm", "</tool_call>", _LENGTH, "", "<|observation|>" + _GLM_RESULT),
    "call with its own close": ("gptoss", "<|call|>", {}, "", _GPTOSS_RESULT),
    "call with its own close, as length": ("gptoss", "}", _LENGTH, "<|call|>", _GPTOSS_RESULT),
    "white space after a call, as length": (
        "blanks", "</tool_call>", _LENGTH, "      <|im_end|>", _BLANKS_REST
    ),
    "call with the other stop": ("other stop", "<|called|>", {}, "", _OTHER_RESULT),
    "call whose stop is followed by EOS": (
        "EOS after", "}", _LENGTH, " END<|called|><|eos|>", "<|im_start|>tool\nsun"
    ),
    "call with the other stop, as length": (
        "other stop", "}", _LENGTH, "<|im_end|><|called|>", _OTHER_RESULT
    ),

}  # fmt: skip


@pytest.mark.parametrize("row", _AFTER_TEXT.values(), ids=_AFTER_TEXT)
def test_cut_after_text(tokenizers: dict[str, ChatTokenizer], row: Row) -> None:
    name, last, how, close, rest = row
    assert appended_text(tokenizers[name], last, [_user()], history=_turn(), **how) == (close, rest)


@pytest.mark.parametrize("row", _AFTER_CALLS.values(), ids=_AFTER_CALLS)
def test_cut_after_calls(tokenizers: dict[str, ChatTokenizer], row: Row) -> None:
    name, last, how, close, rest = row
    texts = appended_text(tokenizers[name], last, [_RESULT], history=_turn_with_calls(), **how)
    assert texts == (close, rest)


@pytest.mark.parametrize(
    "content, text",
    [(None, ""), ([{"type": "text", "text": ""}], ""), (" \n", " \n"), (["a", _REFUSAL], "a\nno")],
)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_message_is_not_taken_for_a_close(
    tokenizers: dict[str, ChatTokenizer], role: str, content: object, text: str
) -> None:
    """A message whose text is not found must not be cut off with the close of the turn."""
    message = {"role": role, "content": content}
    rest = f"\n<|im_start|>{role}\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert appended_text(tokenizers["chatml"], "<|eos|>", [message]) == ("", rest)
    assert appended_text(tokenizers["chatml"], "o", [message], **_LENGTH) == ("<|im_end|>", rest)


def test_reported_stop_token_ends_a_turn(tokenizers: dict[str, ChatTokenizer]) -> None:
    """A request may name stop tokens that the model's configuration does not know."""
    tokenizer = tokenizers["chatml"]
    assert appended_text(tokenizer, "!", [_user()]) == ("<|im_end|>", _CHATML_REST)
    stop = token_id(tokenizer, "<|im_start|>")
    assert appended_text(tokenizer, "<|im_start|>", [_user()], stop_reason=stop) == ("", _CHATML_REST)
    assert appended_text(tokenizer, "o", [_user()], stop_reason=stop) == ("<|im_end|>", _CHATML_REST)
    # ordinary text is no token that ends turns of this template: the close follows it
    text = token_id(tokenizer, "!")
    assert appended_text(tokenizer, "!", [_user()], stop_reason=text) == ("<|im_end|>", _CHATML_REST)


@pytest.mark.parametrize("name", ["chatml", "hermes", "two tokens", "own"])
def test_a_rendered_history_is_not_closed_twice(tokenizers: dict[str, ChatTokenizer], name: str) -> None:
    """Its ids end with what the template prints after the stop token of the last turn."""
    tokenizer, history = tokenizers[name], [_user(), {"role": "assistant", "content": "Yes."}]
    ids = tokenizer.render(history, add_generation_prompt=False)
    for given in (history, None):
        appended = tokenizer.append(ids, [_user()], history=given)
        assert appended.prompt_ids == tokenizer.render([*history, _user()])


def test_a_turn_that_was_cut_off_before_its_first_id_is_closed() -> None:
    """Where the template prints no header, the prompt ends with the close of the message before it."""
    tokenizer = tokenizer_with(
        "{% for m in messages %}{{ m.role + m.content + '<|im_end|>\\n' }}{% endfor %}"
    )
    history = [_user(), {"role": "assistant", "content": ""}]
    ids = [*tokenizer.render(history[:1]), *tokenizer.encode("assistant")]
    appended = tokenizer.append(ids, [_user()], history=history, finish_reason="abort")
    assert appended.prompt_ids == tokenizer.render([*history, _user()])
    closed = tokenizer.append(
        tokenizer.render(history[:1]), [_user()], history=history, finish_reason="abort"
    )
    assert tokenizer.decode(closed.close_ids) == "<|im_end|>"


@pytest.mark.parametrize(
    "name, last, history, new, what",
    [
        # one of two equal tokens of the close, or the end of the prompt of a turn that was aborted at once
        ("repeated", "<|sep|>", _turn(), [_user()], "of the turn's close"),
        ("blanks", " ", _turn_with_calls(), [_RESULT], "white space after the calls"),
    ],
)
def test_ambiguous_last_id_within_a_close_is_refused(
    tokenizers: dict[str, ChatTokenizer], name: str, last: str, history: Any, new: Any, what: str
) -> None:
    with pytest.raises(TemplateUnsupported, match=f"the last id does not tell how much {what} was sampled"):
        appended_text(tokenizers[name], last, new, history=history, finish_reason="abort")


def test_stop_beside_white_space_after_a_call_is_refused(tokenizers: dict[str, ChatTokenizer]) -> None:
    """Without a close, the white space may stand before the stop token or separate messages."""
    with pytest.raises(TemplateUnsupported, match="white space after a call"):
        appended_text(tokenizers["line feed after calls"], "<|eos|>", [_RESULT], history=_turn_with_calls())


@pytest.mark.parametrize("stop, notes", [("<|return|>", ("turn_end_rewritten",)), ("<|end|>", ())])
def test_replaced_stop_is_noted(
    tokenizers: dict[str, ChatTokenizer], stop: str, notes: tuple[str, ...]
) -> None:
    tokenizer = tokenizers["gptoss"]
    appended = tokenizer.append([token_id(tokenizer, stop)], [_user()], history=_turn())
    assert (appended.notes, tokenizer.decode(appended.suffix_ids)) == (notes, _GPTOSS_USER)


@pytest.mark.parametrize("backend", [None, gemma_like, llama2_like, mistral_like])
@pytest.mark.parametrize("close", ["END", " ", "\n", "  END"])
def test_text_without_a_token_at_its_start_has_the_ids_of_the_whole_rendering(
    backend: Any, close: str
) -> None:
    """SentencePiece vocabularies add a space to a text that is encoded alone, which decoders take away."""
    tokenizer = tokenizer_with(_PLAIN_CLOSE.replace(" END", close), backend=backend and backend())
    whole = tokenizer.render([*_turn(), _user()])
    end = token_id(tokenizer, "<|im_end|>")
    ids = tokenizer.append([end], [_user()]).suffix_ids
    assert whole[-len(ids) - 1 :] == [end, *ids]
    last = tokenizer.encode("Hello.")[-1]
    appended = tokenizer.append([last], [_user()])
    ids = appended.close_ids + appended.suffix_ids
    assert whole[-len(ids) - 1 :] == [last, *ids]


def test_without_history_a_turn_of_either_kind_goes_on_after_its_own_stop(
    tokenizers: dict[str, ChatTokenizer],
) -> None:
    """Calls end with white space before the close, and nothing tells whether the turn has any."""
    tokenizer = tokenizers["blanks"]
    assert appended_text(tokenizer, "<|im_end|>", [_RESULT]) == ("", _BLANKS_REST)
    for last, how in (("<|eos|>", {}), ("o", _LENGTH)):
        with pytest.raises(TemplateUnsupported, match="give `history`"):
            appended_text(tokenizer, last, [_RESULT], **how)
