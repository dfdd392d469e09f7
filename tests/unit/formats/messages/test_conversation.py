"""Conversations become the chat messages that vLLM's own route makes of them."""

import json
from typing import Any

import pytest

from tests.support.message_shapes import assistant, user
from tokenproxy.formats.messages.conversation import chat_messages
from tokenproxy.formats.messages.request import read_request

Message = dict[str, Any]
_PIXEL = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
_PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def _system(*blocks: Any) -> Message:
    return {**user(*blocks), "role": "system"}


def _text(text: str, **more: Any) -> Message:
    return {"type": "text", "text": text, **more}


def _result(content: Any, identity: str = "c1", **more: Any) -> Message:
    return {"type": "tool_result", "tool_use_id": identity, "content": content, **more}


def _use(identity: str = "c1", **arguments: Any) -> Message:
    return {"type": "tool_use", "id": identity, "name": "look", "input": arguments}


def _tool(content: Any, identity: str = "c1") -> Message:
    return {"role": "tool", "tool_call_id": identity, "content": content}


def _call(arguments: str = "{}", identity: str = "c1") -> Message:
    return {"id": identity, "type": "function", "function": {"name": "look", "arguments": arguments}}


def _converted(*messages: Message, system: Any = None, merges_system: bool = False) -> list[Message]:
    body = {"model": "m", "messages": list(messages), "system": system}
    request = read_request(json.dumps(body).encode())
    return chat_messages(request.system, request.messages, merges_system=merges_system)[0]


_CACHED = {"cache_control": {"type": "ephemeral"}}
_HEADER = "x-anthropic-billing-header: cc_version=2; cch=1;"
CASES: dict[str, tuple[list[Message], list[Message]]] = {
    "a text": ([user("Hi")], [user("Hi")]),
    "several texts stay parts": ([user(_text("a", **_CACHED), _text("b"))], [user(_text("a"), _text("b"))]),
    "an image": ([user(_text("a"), {"type": "image", "source": _PIXEL})], [user(_text("a"), _PICTURE)]),
    "thinking, text and a call": (
        [assistant({"type": "thinking", "thinking": "so", "signature": "s"}, _text("a"), _use(b=1, a=2))],
        [{**assistant("a"), "reasoning": "so", "tool_calls": [_call('{"b": 1, "a": 2}')]}],
    ),
    "texts around a call and thinking": (
        [assistant(_text("a"), _use(), _text("b"), {"type": "thinking", "thinking": "so"}, _text("c"))],
        [{**assistant("abc"), "reasoning": "so", "tool_calls": [_call()]}],
    ),
    "results in any order": (
        [user(_result("2", "c2"), _text("a"), _result("1", "c1"), _text("b"))],
        [_tool("2", "c2"), _tool("1", "c1"), user(_text("a"), _text("b"))],
    ),
    "a result in parts": ([user(_result([_text("a"), _text("b")]))], [_tool("a\nb")]),
    "a result with an image": (
        [user(_result([{"type": "image", "source": _PIXEL}, _text("a")]), _text("b"))],
        [_tool("a"), user(_PICTURE), user("b")],
    ),
    "a result that names tools": (
        [user(_result([{"type": "tool_reference", "tool_name": "look"}]))],
        [_tool(""), _tool([{"type": "tool_reference", "name": "look"}])],
    ),
    "a system message in the middle": (
        [user("a"), _system(_text(_HEADER), _text("s"), _text("t")), assistant("b"), _system("u")],
        [user("a"), _system("st"), assistant("b"), _system("u")],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_messages(case: tuple[list[Message], list[Message]]) -> None:
    messages, expected = case
    assert _converted(*messages) == expected


@pytest.mark.parametrize(
    "system, expected",
    [
        ("Be brief.", "Be brief."),
        ([_text(_HEADER), _text("a"), _text("b", **_CACHED)], "ab"),
        ([_text(_HEADER)], None),
        ("", None),
    ],
)
def test_the_system_prompt(system: Any, expected: str | None) -> None:
    first = [] if expected is None else [_system(expected)]
    assert _converted(user("Hi"), system=system) == [*first, user("Hi")]


def _merged(*messages: Message) -> list[Message]:
    return _converted(*messages, system="p", merges_system=True)


_LATER: dict[str, tuple[list[Message], list[Message]]] = {
    "after the user": ([user("b"), _system("s"), _system("t")], [user("b\n\ns\n\nt")]),
    "twice before the user": ([_system("s"), _system("t"), user("b")], [user("s\n\nt\n\nb")]),
    "before an answer": ([_system("s"), assistant("b")], [user("s"), assistant("b")]),
    "with parts": (
        [user(_text("b"), {"type": "image", "source": _PIXEL}), _system("s")],
        [user(_text("b"), _PICTURE, _text("s"))],
    ),
}


@pytest.mark.parametrize("case", _LATER.values(), ids=_LATER)
def test_later_system_messages_join_the_users(case: tuple[list[Message], list[Message]]) -> None:
    messages, expected = case
    before = [user("a"), assistant("x")]
    assert _merged(*before, *messages) == [_system("p"), *before, *expected]


@pytest.mark.parametrize("order", [1, -1])
def test_no_system_text_comes_between_a_call_and_its_result(order: int) -> None:
    messages = [_system("s"), user(_result("3"))][::order]
    assert _merged(user("a"), assistant(_use()), *messages)[3:] == [_tool("3"), user("s")]


def test_a_longer_conversation_begins_with_the_messages_of_the_shorter() -> None:
    """Else a later turn would not continue the ids of an earlier one."""
    steps = [
        *(user("a"), _system("p"), assistant(_use()), _system("s"), user(_result("3"), _text("b"))),
        *(_system("t"), assistant("x"), user(_result("4")), _system("u"), assistant("y"), user("c")),
    ]
    ends = [index for index, step in enumerate(steps) if step["role"] == "assistant"]
    whole = _merged(*steps)
    for end in ends:
        part = _merged(*steps[:end])
        assert whole[: len(part)] == part


def test_signatures_belong_to_messages() -> None:
    signed = [{"type": "thinking", "thinking": "", "signature": name} for name in ("s", "", "t")]
    messages = [user("a"), assistant(*signed), user(_result("3"), _text("b")), assistant("c")]
    body = {"model": "m", "messages": messages, "system": "p"}
    request = read_request(json.dumps(body).encode())
    _, signatures = chat_messages(request.system, request.messages, merges_system=False)
    assert signatures == {2: ("s", "t")}
