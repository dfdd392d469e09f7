"""Input items as chat messages."""

import json
from typing import Any

import pytest

from tokenproxy.base.errors import BadRequest
from tokenproxy.formats.responses.items import Names, as_input, messages_of

Item = dict[str, Any]
ONE, TWO = "1" * 32, "2" * 32


def _text(text: str, turn: str = "", index: int = 0) -> Item:
    name = {"id": Names(turn).item("message", index)} if turn else {}
    content = [{"type": "output_text", "text": text}]
    return {"type": "message", "role": "assistant", "content": content, **name}


def _reasoning(text: str, turn: str = "", **fields: Any) -> Item:
    name = {"id": Names(turn).item("reasoning", 0)} if turn else {}
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}], **name, **fields}


def _call(call: str, turn: str = "", **fields: Any) -> Item:
    name = {"id": Names(turn).item("function_call", 1)} if turn else {}
    return {"type": "function_call", "call_id": call, "name": "f", "arguments": "{}", **name, **fields}


def _result(call: str, output: Any = "ok") -> Item:
    return {"type": "function_call_output", "call_id": call, "output": output}


def _chat_call(call: str, name: str = "f", arguments: str = "{}") -> Item:
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}


def _assistant(**fields: Any) -> Item:
    return {"role": "assistant", **fields}


def _tool(call: str, content: Any = "ok") -> Item:
    return {"role": "tool", "tool_call_id": call, "content": content}


_ENCRYPTED = {"type": "encrypted_content", "encrypted_content": "gAAAAABo-x_1="}
_PLAIN = {"type": "encrypted_content", "encrypted_content": "Count the lines."}
_CASES: dict[str, tuple[list[Item], list[Item]]] = {
    "a turn of all kinds": (
        [_reasoning("r"), _text("t"), _call("1"), _call("2"), _result("1"), _result("2")],
        [_assistant(reasoning="r", content="t", tool_calls=[_chat_call(n) for n in "12"]), *map(_tool, "12")],
    ),
    "two texts are two turns": ([_text("a"), _text("b")], [_assistant(content="a"), _assistant(content="b")]),
    "reasoning after a text is the next turn": (
        [_text("a"), _reasoning("r"), _text("b")],
        [_assistant(content="a"), _assistant(reasoning="r", content="b")],
    ),
    "a text after a call belongs to it": (
        [_text("a"), _call("1"), _text("b"), _result("1")],
        [_assistant(content="ab", tool_calls=[_chat_call("1")]), _tool("1")],
    ),
    "ids of one turn join texts": ([_text("a", ONE, 0), _text("b", ONE, 2)], [_assistant(content="ab")]),
    "ids of two turns part items": (
        [_text("a", ONE), _call("1", TWO)],
        [_assistant(content="a"), _assistant(tool_calls=[_chat_call("1")])],
    ),
    "results between the calls of one turn": (
        [_call("1", ONE), _result("1"), _call("2", ONE), _result("2")],
        [_assistant(tool_calls=[_chat_call("1"), _chat_call("2")]), _tool("1"), _tool("2")],
    ),
    "encrypted content names the turn too": (
        [_text("a", ONE, 0), _reasoning("r", encrypted_content=Names(ONE).encrypted(1))],
        [_assistant(content="a", reasoning="r")],
    ),
    "reasoning as a summary": (
        [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": None}],
        [_assistant(reasoning="s")],
    ),
    "reasoning of which nothing is left": (
        [{"type": "reasoning", "summary": [], "encrypted_content": "another server's"}, _text("a")],
        [_assistant(content="a")],
    ),
    "a result with an image": (
        [_result("1", [{"type": "input_image", "image_url": "data:x"}])],
        [_tool("1", [{"type": "image_url", "image_url": {"url": "data:x"}}])],
    ),
    "a custom tool": (
        [
            {"type": "custom_tool_call", "call_id": "1", "name": "sh", "input": 'é "x"\n'},
            {"type": "custom_tool_call_output", "call_id": "1", "output": "ok"},
        ],
        [_assistant(tool_calls=[_chat_call("1", "sh", '{"input": "é \\"x\\"\\n"}')]), _tool("1")],
    ),
    "a function of a namespace": (
        [_call("1", namespace="mcp")],
        [_assistant(tool_calls=[_chat_call("1", "mcp__f")])],
    ),
    "a shell of the client's": (
        [{"type": "local_shell_call", "call_id": "1", "action": {"command": ["ls"]}}, _result("1")],
        [_assistant(tool_calls=[_chat_call("1", "local_shell", '{"command": ["ls"]}')]), _tool("1")],
    ),
    "what a provider ran": (
        [
            {"type": "web_search_call", "action": {"query": "q"}},
            {"type": "image_generation_call"},
            _text("a"),
        ],
        [
            _assistant(
                content="a",
                tool_calls=[
                    _chat_call("web_search", "web_search", '{"query": "q"}'),
                    _chat_call("image_generation", "image_generation"),
                ],
            )
        ],
    ),
    "an output without a call": (
        [{"type": "function_call_output", "name": "notify", "output": "It is noon."}],
        [{"role": "user", "content": "It is noon."}],
    ),
    "a result that is encrypted, and a sound": (
        [_result("1", [_ENCRYPTED, {"type": "input_audio", "audio_url": "data:x"}])],
        [
            _tool(
                "1",
                [
                    {"type": "text", "text": "[part of the message is encrypted]"},
                    {"type": "audio_url", "audio_url": {"url": "data:x"}},
                ],
            )
        ],
    ),
    "what Codex notes between messages": (
        [
            {"type": "additional_tools", "role": "developer", "tools": []},
            {"type": "configuration_update", "reasoning": {"effort": "low"}},
            {"type": "context_compaction"},
            _text("a"),
        ],
        [_assistant(content="a")],
    ),
}


@pytest.mark.parametrize("items, messages", _CASES.values(), ids=_CASES)
def test_messages(items: list[Item], messages: list[Item]) -> None:
    assert messages_of([], items, {})[0] == messages


@pytest.mark.parametrize("kind", ["compaction", "compaction_summary", "context_compaction"])
def test_a_compaction_is_its_summary(kind: str) -> None:
    item = {"type": kind, "encrypted_content": Names(ONE).encrypted(0)}
    summaries = {Names(ONE).item("compaction", 0): "so far"}
    assert messages_of([], [item], summaries)[0] == [{"role": "user", "content": "so far"}]


def _saying(role: str, **part: Any) -> list[Item]:
    return [{"role": role, "content": [part]}]


@pytest.mark.parametrize(
    "value, param",
    [
        ([{"type": "file_search_call", "id": "x"}], "input[0].type"),
        ([{"role": "critic", "content": "a"}], "input[0].role"),
        (_saying("user", type="input_file"), "input[0].content[0].type"),
        (_saying("user", type="input_image", file_id="f"), "input[0].content[0].image_url"),
        (_saying("assistant", type="input_image", image_url="x"), "input[0].content[0].type"),
        ([{**_call("1"), "name": None}], "input[0].name"),
        ([{"type": "function_call_output", "call_id": "1"}], "input[0].output"),
        ([{"type": "compaction", "encrypted_content": "gAAAA"}], "input[0].encrypted_content"),
    ],
)
def test_items_that_are_refused(value: Any, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        messages_of([], as_input(value), {})
    assert refused.value.param == param


@pytest.mark.parametrize("call_id", ["call_1", None])
def test_a_search_for_tools_is_a_call_and_its_result(call_id: str | None) -> None:
    tools = [{"type": "function", "name": "räume", "parameters": {}}]
    name = {"call_id": call_id, "execution": "client", "status": "completed"}
    call: Item = {"type": "tool_search_call", "arguments": {"query": "ö", "limit": 2}, **name}
    messages, _ = messages_of([], [call, {"type": "tool_search_output", "tools": tools, **name}], {})
    said = call_id or "tool_search"
    assert messages == [
        _assistant(tool_calls=[_chat_call(said, "tool_search", '{"query": "ö", "limit": 2}')]),
        {"role": "tool", "tool_call_id": said, "content": json.dumps(tools, ensure_ascii=False)},
    ]


@pytest.mark.parametrize(
    "parts, text",
    [
        ([{"type": "input_text", "text": "Done."}], "Done."),
        (
            [{"type": "input_text", "text": "Done. "}, _ENCRYPTED],
            "Done. [part of the message is encrypted]",
        ),
        ([{"type": "input_text", "text": "Payload:\n"}, _PLAIN], "Payload:\nCount the lines."),
    ],
)
def test_a_message_of_an_agent_is_one_of_the_user(parts: list[Item], text: str) -> None:
    item = {"type": "agent_message", "author": "/root/a", "recipient": "/root", "content": parts}
    expected = {"role": "user", "content": f"Message from /root/a to /root:\n{text}"}
    assert messages_of([], [item], {})[0] == [expected]
