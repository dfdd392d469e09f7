"""The most probable tokens at each sampled id are read where the engine tells them."""

from typing import Any

import pytest

from tests.unit.turn.bodies import (
    CompletionReader,
    chunk,
    encoded,
    piece,
    read_completion,
    whole,
    whole_choice,
)
from tokenproxy.record.turn import pack_alternatives, unpack_alternatives

_HALF = b"\xf0\x9f"
_TOP = [
    {"token": "h", "logprob": -0.5, "bytes": [104]},
    {"token": "\ufffd", "logprob": -1.5, "bytes": list(_HALF)},
    {"token": "é", "logprob": -2.0, "bytes": None},
]
_READ = [(b"h", -0.5), (_HALF, -1.5), ("é".encode(), -2.0)]


def _logprobs(*tops: object) -> dict[str, Any]:
    return {"content": [{"token": "h", "logprob": -0.5, "bytes": [104], "top_logprobs": top} for top in tops]}


def test_alternatives_are_read_as_bytes_and_at_most_twenty() -> None:
    many = [{"token": str(n), "logprob": -float(n), "bytes": None} for n in range(30)]
    body = encoded(whole(whole_choice(logprobs=_logprobs(_TOP, [], many))))
    first, second, third = read_completion(body).choices[0].alternatives
    assert (first, second, len(third)) == (_READ, [], 20)
    reader = CompletionReader()
    for top in (_TOP, _TOP[:1]):
        reader.read(encoded(chunk(piece(logprobs=_logprobs(top)))))
    assert reader.rest().choices[0].alternatives == [_READ, _READ[:1]]
    logprobs = {"token_logprobs": [-0.5, -1.0], "top_logprobs": [{"h": -0.5, " é": -2.0}, None]}
    texts = encoded({"choices": [{"index": 1, "text": "h", "logprobs": logprobs}]})
    assert read_completion(texts).choices[0].alternatives == [[(b"h", -0.5), (" é".encode(), -2.0)], []]
    assert unpack_alternatives(pack_alternatives([_READ, []])) == [_READ, []]
    assert unpack_alternatives(b"") == unpack_alternatives(b"\xc1") == []


@pytest.mark.parametrize(
    "odd", [{"token": 5, "logprob": -1.0}, {"token": "a"}, {"logprob": -1.0, "bytes": [300]}]
)
def test_alternatives_of_another_shape_are_left_out_and_spoil_nothing(odd: object) -> None:
    [choice] = read_completion(encoded(whole(whole_choice(logprobs=_logprobs([odd], []))))).choices
    assert (choice.alternatives, choice.unreadable, choice.logprobs) == ([], "", [-0.5, -0.5])
