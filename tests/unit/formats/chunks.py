"""Chunks of a chat completion, and the events that are written of them."""

import json
from typing import Any

import msgspec

from tokenproxy.formats.messages.answer import MessagesTranslation
from tokenproxy.record.echo import Signer
from tokenproxy.turn import parsing, wire

TURN = "18ea730ff62f6878c5244cad618f0000"
SIGNER = Signer(b"secret")


def chunk(finish: str | None = None, stop: Any = None, usage: Any = None, **delta: Any) -> wire.Completion:
    """A chunk of the first choice."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "stop_reason": stop}
    return parsing.parse(msgspec.json.encode({"id": "chat-1", "choices": [choice], "usage": usage}))


def call(index: int, identity: str | None = None, name: str | None = None, arguments: Any = None) -> Any:
    """A piece of a tool call."""
    return {"index": index, "id": identity, "function": {"name": name, "arguments": arguments}}


def events(*chunks: wire.Completion, early: bool = False, turn_id: str = TURN) -> list[dict[str, Any]]:
    """The events of a stream; each names its type twice."""
    translation = MessagesTranslation("claude")
    translation.signer = SIGNER
    written = translation.begin() if early else b""
    translation.turn_id = turn_id
    written += b"".join(translation.event(b"", each) for each in chunks) + translation.end()
    found = []
    for event in written.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def outline(found: list[dict[str, Any]]) -> list[str]:
    """The events in short: what each says, between the start and the end of the message."""
    assert [event["type"] for event in found[:1] + found[-2:]] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    return [_short(event) for event in found[1:-2]]


def _short(event: dict[str, Any]) -> str:
    index = event["index"]
    match event["type"]:
        case "content_block_start":
            return f"{index} {event['content_block']['type']}"
        case "content_block_delta":
            delta = event["delta"]
            [said] = [value for name, value in delta.items() if name != "type"]
            return f"{index} {delta['type'].removesuffix('_delta')}: {said}"
        case _:
            return f"{index} stop"
