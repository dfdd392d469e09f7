"""The events of a stream: their order, and what each block and the end of the message say."""

import json
from typing import Any

import msgspec
import pytest

from tests.unit.formats.chunks import SIGNER, TURN, call, chunk, events, outline
from tokenproxy.formats.messages.answer import MessagesTranslation
from tokenproxy.record.completion import Completion
from tokenproxy.turn import parsing, wire

_SIGNATURE = SIGNER.sign("", TURN)
_ROLE = chunk(role="assistant", content="")
_END = chunk("stop")
_CASES: dict[str, tuple[list[wire.Completion], list[str]]] = {
    "no chunk at all": ([], ["0 text", "0 stop"]),
    "thinking, then text": (
        [_ROLE, chunk(reasoning="a"), chunk(reasoning_content="b"), chunk(content="c"), _END],
        ["0 thinking", "0 thinking: a", "0 thinking: b", f"0 signature: {_SIGNATURE}", "0 stop",
         "1 text", "1 text: c", "1 stop"],
    ),
    "parallel calls": (
        [chunk(content="x"), chunk(tool_calls=[call(0, "c1", "look", "{}"), call(1, "c2", "look")]),
         chunk(tool_calls=[call(1, arguments="{}")]), _END],
        ["0 text", "0 text: x", "0 stop", "1 tool_use", "1 input_json: {}", "1 stop",
         "2 tool_use", "2 input_json: {}", "2 stop"],
    ),
    "arguments that are no object": (
        [chunk(tool_calls=[call(0, "c1", "look", '"a"')])], ["0 tool_use", "0 stop"]
    ),
    "text while a call is written": (
        [chunk(tool_calls=[call(0, "c1", "look", "{")]), chunk(content="x"),
         chunk(tool_calls=[call(0, arguments="}")]), chunk(content="y"), _END],
        ["0 tool_use", "0 input_json: {", "0 input_json: }", "0 stop", "1 text", "1 text: x",
         "1 text: y", "1 stop"],
    ),
    "white space after a call, and reasoning before the rest of the text": (
        [chunk(tool_calls=[call(0, "c1", "look", "{}")]), chunk(content=" "), chunk(reasoning="so"),
         chunk(content="a"), _END],
        ["0 tool_use", "0 input_json: {}", "0 stop", "1 thinking", "1 thinking: so",
         f"1 signature: {_SIGNATURE}", "1 stop", "2 text", "2 text:  a", "2 stop"],
    ),
    "white space and text between calls": (
        [chunk(tool_calls=[call(0, "c1", "look", "{}")]), chunk(content="\n"),
         chunk(tool_calls=[call(1, "c2", "look", "{}")]), chunk(content="a\n"),
         chunk(tool_calls=[call(2, "c3", "look", "{}")]), chunk(content="\n"), _END],
        ["0 tool_use", "0 input_json: {}", "0 stop", "1 tool_use", "1 input_json: {}", "1 stop",
         "2 text", "2 text: \na\n", "2 stop", "3 tool_use", "3 input_json: {}", "3 stop"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
@pytest.mark.parametrize("early", [False, True])
def test_blocks(case: tuple[list[wire.Completion], list[str]], early: bool) -> None:
    chunks, expected = case
    assert outline(events(*chunks, early=early)) == expected


@pytest.mark.parametrize(
    "finish, stop, tool, expected",
    [
        ("stop", "END", "", ("stop_sequence", "END")),
        ("length", None, "{", ("max_tokens", None)),
        ("stop", "END", "{}", ("tool_use", None)),
        ("stop", "END", '{"a": ', ("stop_sequence", "END")),
        (None, None, "", ("end_turn", None)),
    ],
)
def test_stop_reasons(finish: str | None, stop: Any, tool: str, expected: tuple[Any, Any]) -> None:
    calls = {"tool_calls": [call(0, "c1", "look", tool)]} if tool else {"content": "a"}
    delta = events(chunk(**calls), chunk(finish, stop))[-2]["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == expected


def _usage(sampled: int, cached: int | None = None, thinking: int | None = None) -> dict[str, Any]:
    return {
        **{"prompt_tokens": 20, "completion_tokens": sampled},
        "prompt_tokens_details": cached and {"cached_tokens": cached},
        "completion_tokens_details": thinking and {"reasoning_tokens": thinking},
    }


def test_the_start_and_the_end_have_usage() -> None:
    started, *_, ended, stopped = events(
        chunk(usage=_usage(0, 16), role="assistant", content=""),
        chunk(content="a", usage=_usage(1)),
        chunk("stop", usage=_usage(5, 16, 3)),
    )
    message = started["message"]
    expected = {"id": f"msg_{TURN}", "type": "message", "role": "assistant", "model": "claude", "content": []}
    assert {name: message[name] for name in expected} == expected
    assert (message["stop_reason"], message["stop_sequence"]) == (None, None)
    counts = {"input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 16}
    assert message["usage"].items() >= {**counts, "output_tokens": 0, "service_tier": "standard"}.items()
    details = {"output_tokens_details": {"thinking_tokens": 3}, "server_tool_use": None}
    assert ended["usage"] == {**counts, "output_tokens": 5, **details}
    assert stopped == {"type": "message_stop"}


def test_ids_of_messages() -> None:
    assert events(chunk("stop"), turn_id="")[0]["message"]["id"] == "msg_chat-1"
    first, second = (events(chunk("stop"), early=True)[0]["message"]["id"] for _ in range(2))
    assert first.startswith("msg_") and first != second


def test_the_call_has_the_ids_of_the_engine() -> None:
    own = "chatcmpl-tool-0123456789abcdef"
    found = events(chunk(tool_calls=[call(0, own, "look", "{}"), call(1, "look:1", "look", "{}")]))
    blocks = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    assert blocks[0] == {"type": "tool_use", "id": own, "name": "look", "input": {}}
    assert blocks[1]["id"] == f"call_{SIGNER.sign('', TURN, 1)}"
    unrecorded = events(chunk(tool_calls=[call(0, "look:0", "look", "{}")]), turn_id="")
    assert unrecorded[1]["content_block"]["id"] == "look:0"
    made = events(chunk(tool_calls=[call(0, None, "look", "{}")]), turn_id="")[1]["content_block"]["id"]
    assert made.startswith("toolu_")
    # an id that comes after the name is used until arguments are sent; then the id names the call of the turn
    for begun, identity in ((None, own), ("{", f"call_{SIGNER.sign('', TURN, 0)}")):
        pieces = call(0, None, "look", begun), call(0, own, None, "}" if begun else "{}")
        assert events(*(chunk(tool_calls=[each]) for each in pieces))[1]["content_block"]["id"] == identity


def _call(arguments: str | None) -> dict[str, Any]:
    return {"id": "call_c1c1c1c1c1c1c1c1", "function": {"name": "look", "arguments": arguments}}


def _use(arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": "call_c1c1c1c1c1c1c1c1", "name": "look", "input": arguments}


_TEXT = {"type": "text", "text": "a"}
_THINKING = {"type": "thinking", "thinking": "so", "signature": _SIGNATURE}


@pytest.mark.parametrize(
    "message, content",
    [
        ({"content": None}, [{"type": "text", "text": ""}]),
        ({"content": "a", "reasoning_content": "so"}, [_THINKING, _TEXT]),
        ({"content": "a", "tool_calls": [_call('{"b": 1, "a": 2}')]}, [_TEXT, _use({"b": 1, "a": 2})]),
        ({"tool_calls": [_call('{"a": ')]}, [_use({})]),
    ],
)
def test_content_of_a_whole_answer(message: dict[str, Any], content: list[Any]) -> None:
    choices = [{"message": message, "finish_reason": "stop"}]
    chat = parsing.parse(msgspec.json.encode({"id": "chat-1", "choices": choices}))
    translation = MessagesTranslation("claude")
    translation.turn_id, translation.signer = TURN, SIGNER
    assert json.loads(translation.whole(chat, b"", Completion()))["content"] == content
