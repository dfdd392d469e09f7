"""Messages after a turn that a client sent back in another form."""

import json
from types import SimpleNamespace
from typing import Any

from tests.support.talk import Message, call, result
from tokenproxy.record.cache import TurnCache
from tokenproxy.record.lenient import messages_after


def test_results_get_the_recorded_ids() -> None:
    own, sent = ({"role": "assistant", "content": text, "tool_calls": [call(identity=name)]} for text, name in
                 (("I look.", "own"), ("", "new")))  # fmt: skip
    results: list[Message] = [result({"id": name}, "r") for name in ("new", "other")]
    cache = TurnCache(2**20)
    conversation = cache.parse(
        cache.recall(json.dumps([{"role": "user", "content": "Hi"}, sent, *results]).encode())
    )
    turn: Any = SimpleNamespace(call_ids=("own",))
    new, history = messages_after(conversation, 1, turn, json.dumps(own).encode())
    assert [message["tool_call_id"] for message in new] == ["own", "other"]
    assert history[1] == own
    as_sent, history = messages_after(conversation, 1, turn, b"")
    assert (as_sent, history[1]) == (results, sent)
