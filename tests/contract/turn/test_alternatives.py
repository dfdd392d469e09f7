"""The most probable tokens at each sampled id, and the prefix cache: recorded where the engine tells them."""

import json
from typing import Any

import httpx
import msgspec
import pytest

from proxy.history.turn import Turn, pack_alternatives, unpack_alternatives
from proxy.turn.alternatives import read_alternatives
from proxy.turn.chunk import Usage
from proxy.turn.reader import StreamReader, read_completion
from proxy.turn.usual_chunk import UsualChunk
from tests.support.fake_vllm import Canned, FakeVllm
from tests.support.talk import CHAT, user

_HALF = b"\xf0\x9f"
_TOP = [
    {"token": "h", "logprob": -0.5, "bytes": [104]},
    {"token": "\ufffd", "logprob": -1.5, "bytes": list(_HALF)},
    {"token": "é", "logprob": -2.0, "bytes": None},
]
_READ = [(b"h", -0.5), (_HALF, -1.5), ("é".encode(), -2.0)]


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _entry(top: object, logprob: float = -0.5) -> dict[str, Any]:
    return {"token": "h", "logprob": logprob, "bytes": [104], "top_logprobs": top}


def _completion(*tops: object, usage: object = None) -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "hh"},
        "logprobs": {"content": [_entry(top) for top in tops]},
        "finish_reason": "stop",
        "token_ids": [74] * len(tops),
    }
    return _dump({"choices": [choice], "prompt_token_ids": [1], "usage": usage})


def test_what_a_completion_holds_is_read_as_bytes() -> None:
    completion = read_completion(_completion(_TOP, []))
    assert completion.choices[0].alternatives == [_READ, []]


def test_a_completion_of_texts_is_read_too() -> None:
    logprobs = {"token_logprobs": [-0.5, -1.0], "top_logprobs": [{"h": -0.5, " é": -2.0}, None]}
    body = _dump({"choices": [{"index": 1, "text": "h", "logprobs": logprobs}]})
    assert read_alternatives(body) == {1: [[(b"h", -0.5), (" é".encode(), -2.0)], []]}


def test_at_most_twenty_are_kept() -> None:
    top = [{"token": str(n), "logprob": -float(n), "bytes": None} for n in range(30)]
    assert len(read_completion(_completion(top)).choices[0].alternatives[0]) == 20


@pytest.mark.parametrize(
    "top",
    [
        [{"token": 5, "logprob": -1.0}],
        [{"token": "a"}],
        [{"logprob": "x"}],
        [{"logprob": -1.0, "bytes": [300]}],
    ],
)
def test_what_has_another_shape_is_left_out_and_spoils_nothing(top: object) -> None:
    [choice] = read_completion(_completion(top)).choices
    assert (choice.alternatives, choice.unreadable) == ([], "")
    assert choice.logprobs == [-0.5]


def _chunk(top: object, **fields: object) -> bytes:
    choice = {
        "index": 0,
        "delta": {"content": "h"},
        "logprobs": {"content": [_entry(top)]},
        "finish_reason": None,
        "token_ids": [74],
    }
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    usage = {"prompt_tokens": 1, "total_tokens": 2, "completion_tokens": 1}
    return _dump({**head, "choices": [choice], "usage": usage, **fields})


def test_a_stream_collects_them() -> None:
    reader = StreamReader()
    for top in (_TOP, _TOP[:1]):
        reader.read(_chunk(top))
    [choice] = reader.rest().choices
    assert choice.alternatives == [_READ, _READ[:1]]


@pytest.mark.parametrize("top, usual", [([], True), (_TOP[:1], False)])
def test_a_chunk_with_alternatives_is_parsed(top: object, usual: bool) -> None:
    chunk = UsualChunk.match(b"data: " + _chunk(top) + b"\n\n")
    assert chunk is not None
    assert (chunk.piece() is not None) is usual


@pytest.mark.parametrize(
    "details, cached",
    [
        ({"cached_tokens": 384}, 384),
        ({"cached_tokens": None}, None),
        ({"cached_tokens": -1}, None),
        ("many", None),
        (None, None),
    ],
)
def test_cached_ids_are_those_of_the_usage(details: object, cached: int | None) -> None:
    usage = {"completion_tokens": 1, "prompt_tokens_details": details}
    completion = read_completion(_completion([], usage=usage))
    assert (completion.cached_tokens, completion.completion_tokens) == (cached, 1)
    # the same where the body must be read field by field
    lenient = _completion([], usage=usage)[:-1] + b',"odd":NaN}'
    assert read_completion(lenient).cached_tokens == cached
    assert msgspec.json.decode(_dump(usage), type=Usage).cached_tokens == cached


def test_packed_alternatives_are_read_back() -> None:
    assert unpack_alternatives(pack_alternatives([_READ, []])) == [_READ, []]
    assert unpack_alternatives(b"") == unpack_alternatives(b"\xc1") == []


def test_turns_that_were_recorded_without_them_are_still_read() -> None:
    old = {
        "id": "a",
        "rollout": "r",
        "request": "a",
        "created": 1.0,
        "model": "m",
        "prompt_tokens": 1,
        "source": "given",
    }
    turn = msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=Turn)
    assert (turn.cached_tokens, turn.alternatives) == (None, b"")


def test_they_are_recorded_with_the_turn(client: httpx.Client, fake: FakeVllm) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 384}}
    body = _completion(_TOP, usage={**usage, "total_tokens": 2})
    fake.canned[CHAT] = Canned(body, headers={"content-type": "application/json"})
    messages = [user("with alternatives")]
    asked = {"messages": messages, "logprobs": True, "top_logprobs": 3}
    client.post(CHAT, json=asked, headers={"x-session-id": "alternatives"})
    [turn] = client.get("/v1/sessions/alternatives?ids=true").json()["turns"]
    assert turn["cached_tokens"] == 384
    [first, second, third] = turn["alternatives"][0]
    assert (first, third) == ({"token": "h", "logprob": -0.5}, {"token": "é", "logprob": -2.0})
    assert second["logprob"] == -1.5
