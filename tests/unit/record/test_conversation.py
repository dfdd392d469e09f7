import json
from typing import Any

from tokenproxy.record.cache import TurnCache
from tokenproxy.record.identity import Conversation

_TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind"},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "hello", "reasoning": "so"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "end"},
]


def read(messages: object) -> Conversation:
    """A conversation as a request brings it."""
    return TurnCache(2**20).parse(json.dumps(messages).encode())


def test_turns_end_at_assistant_messages_that_others_follow() -> None:
    assert read(_TALK).ends == [5, 4, 2]
    assert (read(_TALK[:6]).ends, read(_TALK[:3]).ends, read([]).ends) == ([4, 2], [], [])
    assert [read(_TALK[:n]).ends_with_assistant for n in range(8)] == [n in (3, 5, 6) for n in range(8)]


def test_messages_come_back_as_they_were_spelled() -> None:
    raw = b'[ {"role":"user", "content" : "\\u00e9"} ,{"role":"user","content":"x"}]'
    conversation = TurnCache(2**20).parse(raw)
    assert conversation.json(0) == b'[{"role":"user", "content" : "\\u00e9"},{"role":"user","content":"x"}]'
    assert conversation.json(2) == b"[]"
    assert conversation.parse(1) == [{"role": "user", "content": "x"}]
