"""A whole answer has the blocks, the stop reason and the usage of the completion."""

import json
from typing import Any

import msgspec
import pytest

from proxy.dialects.chat_parts import decode_chat
from proxy.dialects.messages.events import MessagesTranslation
from tests.support.chunks import SIGNER, TURN


def _answer(message: dict[str, Any] | None, finish: str = "stop", stop: Any = None) -> dict[str, Any]:
    choices = [] if message is None else [{"message": message, "finish_reason": finish, "stop_reason": stop}]
    usage = {"prompt_tokens": 9, "completion_tokens": 3}
    chat = decode_chat(msgspec.json.encode({"id": "chat-1", "choices": choices, "usage": usage}))
    translation = MessagesTranslation("claude")
    translation.turn_id, translation.signer = TURN, SIGNER
    answer: dict[str, Any] = json.loads(translation.whole(chat))
    return answer


def _call(arguments: str | None, identity: str = "call_c1c1c1c1c1c1c1c1") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": "look", "arguments": arguments}}


def _use(arguments: Any, identity: str = "call_c1c1c1c1c1c1c1c1") -> dict[str, Any]:
    return {"type": "tool_use", "id": identity, "name": "look", "input": arguments}


_TEXT = {"type": "text", "text": "a"}
_THINKING = {
    "type": "thinking",
    "thinking": "so",
    "signature": SIGNER.sign("", TURN),
}


@pytest.mark.parametrize(
    "message, content",
    [
        ({"content": "a"}, [_TEXT]),
        ({"content": None}, [{"type": "text", "text": ""}]),
        (None, [{"type": "text", "text": ""}]),
        ({"content": "a", "reasoning": "so"}, [_THINKING, _TEXT]),
        ({"reasoning_content": "so"}, [_THINKING]),
        (
            {"content": "a", "tool_calls": [_call('{"b": 1, "a": 2}'), _call("{}", "call_c2c2c2c2c2c2c2c2")]},
            [_TEXT, _use({"b": 1, "a": 2}), _use({}, "call_c2c2c2c2c2c2c2c2")],
        ),
        ({"tool_calls": [_call('{"a": ')]}, [_use({})]),
        ({"tool_calls": [_call("[1]")]}, [_use({})]),
        ({"tool_calls": [_call(None)]}, [_use({})]),
    ],
)
def test_content(message: dict[str, Any] | None, content: list[Any]) -> None:
    assert _answer(message)["content"] == content


def test_fields() -> None:
    answer = _answer({"content": "a"})
    fixed = {"id": f"msg_{TURN}", "type": "message", "role": "assistant", "model": "claude"}
    assert {name: answer[name] for name in fixed} == fixed
    assert (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]) == (9, 3)
    assert answer["usage"]["cache_read_input_tokens"] == answer["usage"]["cache_creation_input_tokens"] == 0


@pytest.mark.parametrize(
    "finish, stop, calls, expected",
    [
        ("stop", None, False, ("end_turn", None)),
        ("stop", "END", False, ("stop_sequence", "END")),
        ("length", None, True, ("max_tokens", None)),
        ("stop", "END", True, ("tool_use", None)),
        ("tool_calls", None, True, ("tool_use", None)),
        ("content_filter", None, False, (None, None)),
    ],
)
def test_stop_reason(finish: str, stop: Any, calls: bool, expected: tuple[str | None, str | None]) -> None:
    answer = _answer({"tool_calls": [_call("{}")]} if calls else {"content": "a"}, finish, stop)
    assert (answer["stop_reason"], answer["stop_sequence"]) == expected
