"""Reads the most probable tokens at each sampled id, where the client asked for them (`top_logprobs`).

They are shown to people and never trained on: what cannot be read is left out.
"""

from typing import Annotated

import msgspec

from proxy.history.turn import Alternatives
from proxy.turn.engine_json import REFUSALS

MARK = b'"top_logprobs":[{'
"""In JSON without white space, what holds alternatives holds this; in a string the quotes are escaped."""
_MOST = 20
"""For one id: as many as OpenAI's API allows."""


_Byte = Annotated[int, msgspec.Meta(ge=0, le=255)]


class _Token(msgspec.Struct, gc=False):
    logprob: float
    token: str = ""
    octets: list[_Byte] | None = msgspec.field(name="bytes", default=None)

    def spelled(self) -> bytes:
        return self.token.encode("utf-8", "replace") if self.octets is None else bytes(self.octets)


class _Entry(msgspec.Struct, gc=False):
    top_logprobs: list[_Token] | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Entry] | None = None
    """In a chat completion."""
    top_logprobs: list[dict[str, float] | None] | None = None
    """In a completion."""

    def alternatives(self) -> Alternatives:
        if self.content is not None:
            return [
                [(token.spelled(), token.logprob) for token in (entry.top_logprobs or ())[:_MOST]]
                for entry in self.content
            ]
        return [
            [
                (text.encode("utf-8", "replace"), logprob)
                for text, logprob in list((each or {}).items())[:_MOST]
            ]
            for each in self.top_logprobs or ()
        ]


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct, gc=False):
    choices: list[_Choice] = []


_decode = msgspec.json.Decoder(_Completion).decode


def read_alternatives(data: bytes) -> dict[int, Alternatives]:
    """The alternatives in a completion, or in a chunk of a stream, by the index of the choice."""
    if MARK not in data:
        return {}
    try:
        choices = _decode(data).choices
    except REFUSALS:
        return {}
    return {choice.index: choice.logprobs.alternatives() for choice in choices if choice.logprobs is not None}
