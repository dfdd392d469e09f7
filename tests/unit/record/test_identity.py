"""Conversations and where turns may end, and the keys by which a prompt of ids finds turns."""

import json
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.support.recording import scope_of
from tokenproxy.record.cache import TurnCache
from tokenproxy.record.identity import Conversation, ids_entries, prefix_keys
from tokenproxy.record.turn import pack_ids

_SCOPE = scope_of("s")
_TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind"},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "hello", "reasoning": "so"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "end"},
]


def _conversation(messages: bytes) -> Conversation:
    cache = TurnCache(2**20)
    return cache.parse(cache.recall(messages))


def _ids(count: int) -> list[int]:
    return random.Random(7).choices(range(1000), k=count)


@given(turn=st.integers(1, 5000), added=st.integers(0, 5000))
def test_a_prompt_has_the_key_of_each_turn_that_it_begins_with(turn: int, added: int) -> None:
    ids = _ids(turn + added)
    key = ids_entries(_SCOPE, pack_ids(ids[:turn]), b"")[0].key
    assert key in prefix_keys(_SCOPE, pack_ids(ids))


def test_turns_end_at_assistant_messages_that_others_follow() -> None:
    parts = [_conversation(json.dumps(_TALK[:n]).encode()) for n in range(8)]
    assert [parts[n].ends for n in (7, 6, 3, 0)] == [[5, 4, 2], [4, 2], [], []]
    assert [part.ends_with_assistant for part in parts] == [n in (3, 5, 6) for n in range(8)]


def test_messages_come_back_as_they_were_spelled() -> None:
    raw = b'[ {"role":"user", "content" : "\\u00e9"} ,{"role":"user","content":"x"}]'
    conversation = _conversation(raw)
    assert conversation.json(0) == b'[{"role":"user", "content" : "\\u00e9"},{"role":"user","content":"x"}]'
    assert conversation.json(2) == b"[]"
    assert conversation.parse(1) == [{"role": "user", "content": "x"}]
