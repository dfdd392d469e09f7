"""Chunks of a stream, as they go on to a client."""

import json
from typing import Any

from proxy.turn.completion import DONE, ChunkReader, Wanted


def _chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
    return json.dumps({"id": "c", "choices": choices, **more}, separators=(",", ":")).encode()


def _passed(reader: ChunkReader, *chunks: bytes) -> list[dict[str, Any]]:
    """What the client gets of a stream."""
    passed = []
    for data in (*chunks, DONE):
        kept = reader.take(data) if data != DONE else None
        passed += [json.loads(one) for one in (reader.held(data), kept) if one is not None]
    return passed


_TEXT = _chunk([{"index": 0, "delta": {"content": "a"}, "token_ids": [5], "finish_reason": None}])
_END = _chunk([{"index": 0, "delta": {}, "token_ids": [2], "finish_reason": "stop"}])
_USAGE = _chunk([], usage={"completion_tokens": 2}, system_fingerprint="vllm-1")


def test_the_fingerprint_stands_where_a_stream_without_usage_has_it() -> None:
    text, end = _passed(ChunkReader(Wanted(ids=False, logprobs=False)), _TEXT, _END, _USAGE)
    assert "system_fingerprint" not in text
    assert end["system_fingerprint"] == "vllm-1"
    assert end["choices"][0]["finish_reason"] == "stop"


def test_an_engine_that_sends_no_usage() -> None:
    assert len(_passed(ChunkReader(Wanted(ids=False, logprobs=False)), _TEXT, _END)) == 2


def test_usage_that_was_asked_for_goes_on() -> None:
    *_, end, usage = _passed(ChunkReader(Wanted(ids=False, logprobs=False, usage=True)), _TEXT, _END, _USAGE)
    assert "system_fingerprint" not in end
    assert usage == json.loads(_USAGE)


def test_the_end_of_the_last_choice_is_the_one_that_waits() -> None:
    other = _chunk([{"index": 1, "delta": {}, "token_ids": [2], "finish_reason": "stop"}])
    reader = ChunkReader(Wanted(ids=False, logprobs=False), expected=2)
    kept = [reader.take(_END), reader.take(other)]
    assert kept[0] is not None and kept[1] is None
    assert [choice.index for choice in reader.ended().choices] == [0, 1]
    assert reader.held(other) is None
    assert reader.held(DONE) is not None
    assert reader.held(DONE) is None
