"""What is recorded of one turn, and how ids and log-probabilities are packed.

Law, for every turn with a parent:

    prompt_ids(turn) == prompt_ids(parent) + completion_ids(parent) + turn.appended

Only the difference to the parent is kept, so a conversation of n tokens takes O(n) bytes, however many turns
it has.
"""

import re
import secrets
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

T = TypeVar("T", int, float)

_MADE_UP = re.compile(r"[0-9a-f]{28}0000")

ABORTED = "abort"
"""The finish reason of a turn whose client left, or whose engine broke, before its end."""


class WeightSpan(msgspec.Struct, frozen=True, array_like=True):
    """Completion ids `start` to `end` (exclusive) of a turn were sampled with weights `version`."""

    version: str
    start: int
    end: int


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sampled completion, as the difference to the turn it continues; n > 1 makes n of them."""

    id: str
    """32 hexadecimal digits that sort by the time of the request; see `turn_id`."""
    rollout: str
    """The session's id, or one made for a conversation without a session."""
    parent: str | None = None
    """The turn whose ids this prompt begins with; None for one that begins anew."""
    request: str
    """Shared by the n turns of one request."""
    choice: int = 0
    """Index among the choices of the request."""
    created: float
    """Seconds since the epoch when the turn was recorded."""
    model: str
    """The model or LoRA name the client asked for, or the engine's base model."""
    tools: bytes = b""
    """The request's tools as JSON; empty if none, and where a parent has the same."""
    template_kwargs: bytes = b""
    """What the request passed to the template, as JSON; empty if nothing, and where a parent has the same."""
    messages: bytes = b"[]"
    """JSON array: the messages that stand behind the parent's conversation, as the client sent them."""
    message: bytes = b"{}"
    """JSON object: the assistant's message as the engine parsed it."""
    appended: bytes = b""
    """Packed ids: the prompt behind the parent's ids; the whole prompt if there is no parent."""
    completion: bytes = b""
    """Packed ids that were sampled, the stop token included."""
    logprobs: bytes = b""
    """Packed log-probabilities, one for each completion id; empty if the engine gave none."""
    prompt_tokens: int
    """Number of ids in the whole prompt."""
    source: str
    """`extended`, `rendered` or `given`: how the prompt came about."""
    reason: str = ""
    """Why the prompt is not an extension of all that was said before; empty if it is."""
    finish_reason: str | None = None
    """As the engine said it; `abort` if it could not say it."""
    stop_reason: str | int | None = None
    """The stop string or token that ended the turn, as vLLM says it."""
    temperature: float | None = None
    """What the request asked for; None if it left that to the engine."""
    problem: str = ""
    """Why the turn cannot be trained on, one of `proxy.history.evidence.PROBLEMS`; empty if it can."""
    weight_versions: tuple[WeightSpan, ...] = ()
    routed_experts: str | None = None
    """As the engine returned it (base64 of an .npy array)."""
    settings: tuple[bytes, ...] = ()
    """Digests of tools, template arguments and model."""
    strict_before: bytes = b""
    """Digest of the request's messages as the client spelled them."""
    strict: bytes = b""
    """Digest of the assistant's message."""
    reasonings: tuple[bytes, ...] = ()
    """Digests of the reasoning of each assistant message in `messages` and then of `message`."""

    @property
    def aborted(self) -> bool:
        """Whether the turn was broken off."""
        return self.finish_reason == ABORTED

    @property
    def completion_tokens(self) -> int:
        """Number of sampled ids."""
        return len(self.completion) // 4


def new_id() -> str:
    """A name nobody else has; later ones sort behind earlier ones, to the clock's precision."""
    return f"{time.time_ns():016x}{secrets.token_hex(6)}0000"


def made_up(rollout: str) -> bool:
    """Whether a rollout has an id of `new_id`, because no client named it."""
    return _MADE_UP.fullmatch(rollout) is not None


def turn_id(request: str, choice: int) -> str:
    """The id of a turn, known before anything is sampled. The first choice has the request's own."""
    return f"{request[:-4]}{choice:04x}"


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian 32-bit integers."""
    return _pack(array("i", ids))


def unpack_ids(packed: bytes) -> list[int]:
    """The inverse of `pack_ids`."""
    return _unpack(array("i"), packed).tolist()


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Log-probabilities as little-endian 32-bit floats, the engine's own precision."""
    return _pack(array("f", logprobs))


def unpack_logprobs(packed: bytes) -> list[float]:
    """The inverse of `pack_logprobs`."""
    return _unpack(array("f"), packed).tolist()


def _pack(values: "array[Any]") -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _unpack(values: "array[T]", packed: bytes) -> "array[T]":
    values.frombytes(packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values
