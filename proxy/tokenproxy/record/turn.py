"""The record of one turn, its entries in the index, and the packing of ids and log-probabilities.

Law, for every turn with a parent:

    prompt_ids(turn) == prompt_ids(parent) + completion_ids(parent) + turn.appended

Only the difference to the parent is stored, so a conversation of n tokens takes O(n) bytes with any number of
turns. The n choices of one request share a prompt: one of their turns holds it, the others name it.
"""

import os
import sys
import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from tokenproxy.base.evidence import RECORDED, with_facts
from tokenproxy.base.images import Image
from tokenproxy.record.vocabulary import ABORTED

T = TypeVar("T", int, float)


Alternatives = list[list[tuple[bytes, float]]]
"""For each sampled id the most probable tokens there, as their bytes and log-probabilities."""


_ALTERNATIVES = msgspec.msgpack.Decoder(Alternatives)


class PromptImage(msgspec.Struct, frozen=True, array_like=True):
    """An image in the ids of a prompt."""

    offset: int
    """Index of its first id in the whole prompt."""
    length: int
    """Number of its ids."""
    digest: str
    """32 hexadecimal digits: blake2b of `data`."""
    kind: str
    """Media type."""
    data: bytes

    @property
    def image(self) -> Image:
        """The image alone."""
        return Image(self.kind, self.data, self.digest)


class WeightSpan(msgspec.Struct, frozen=True, array_like=True):
    """Completion ids `start` to `end` (exclusive) of a turn were sampled with weights `version`."""

    version: str
    start: int
    end: int


class Segment(msgspec.Struct, frozen=True):
    """What one engine sampled of a turn without a break."""

    replica: str
    """Name of the replica."""
    start: int
    end: int
    """Its ids are `completion[start:end]`."""
    ended: str = ""
    """Why it ended; empty for the last one, which ended as the turn did."""


OF_PROMPT = ("messages", "appended", "images", "tools", "template_kwargs")
"""The fields of a turn that the choices of one request share."""


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sampled completion, as the difference to the turn it continues; n > 1 makes n of them."""

    id: str
    """32 hexadecimal digits that sort by the time of the request; see `turn_id`."""
    rollout: str
    """Id of the session the turn belongs to: see `tokenproxy.record.store.session_id`."""
    parent: str | None = None
    """The turn whose ids this prompt begins with; None if it starts a tree."""
    request: str
    """Shared by the n turns of one request."""
    choice: int = 0
    """Index among the choices of the request."""
    created: float
    """Seconds since the epoch when the turn was recorded."""
    model: str
    """The model or LoRA adapter that sampled it."""
    replica: str = ""
    """Name of the replica that served it and may hold its ids in its prefix cache; empty if unknown."""
    prompt_turn: str | None = None
    """The turn of the same request that holds the fields `OF_PROMPT` for this one; None if this one does.
    Stores fill them in when they return the turn."""
    tools: bytes | None = None
    """The request's tools as JSON, b"" for none; None if they are those of the parent."""
    template_kwargs: bytes | None = None
    """The template's arguments as JSON, b"" for none; None if they are those of the parent."""
    messages: bytes = b"[]"
    """JSON array: the messages after the parent's conversation, as the client sent them."""
    message: bytes = b"{}"
    """JSON object: the assistant's message as the engine parsed it."""
    appended: bytes = b""
    """Packed ids: the prompt after the parent's ids; the whole prompt if there is no parent."""
    images: tuple[PromptImage, ...] = ()
    """The images in `appended`."""
    completion: bytes = b""
    """Packed ids that were sampled, the stop token included."""
    logprobs: bytes = b""
    """Packed log-probabilities, one for each completion id; empty if the engine gave none."""
    alternatives: bytes = b""
    """`Alternatives` of the sampled ids, packed; empty if the engine returned none."""
    prompt_tokens: int
    """Number of ids in the whole prompt."""
    cached_tokens: int | None = None
    """Number of prompt ids from the engine's prefix cache; None if the engine did not tell in time: a stream
    tells it last, after the turn was recorded."""
    source: str
    """A `Source`."""
    reason: str = ""
    """A `Reason`; empty if the prompt extends the whole recorded history."""
    finish_reason: str | None = None
    """The engine's finish reason; `abort` if the turn was broken off."""
    stop_reason: str | int | None = None
    """The stop string or token that ended the turn, as vLLM reports it."""
    temperature: float | None = None
    """The requested temperature; None for the engine's default."""
    off_policy: tuple[str, ...] = ()
    """The sampling parameters in which its request differed from the session's `SamplingPolicy`."""
    after_finish: bool = False
    """Whether its session had been finished when its request arrived."""
    logprobs_mode: str = ""
    """The server's `--logprobs-mode`; empty if unknown."""
    logprobs_without: tuple[str, ...] = ()
    """The sampling parameters that `logprobs` leave out because of that mode, or may if it is unknown."""
    problem: str = ""
    """A `Problem` that makes the turn untrainable; empty if it can be trained on."""
    weight_versions: tuple[WeightSpan, ...] = ()
    weights_uncertain: bool = False
    """Whether each id was sampled with one of `weight_versions`, and it is not known with which."""
    segments: tuple[Segment, ...] = ()
    """If the turn was resumed, what was sampled where; an empty one stands for ids that were dropped."""
    began_anew: tuple[str, ...] = ()
    """Fields of the request, such as `presence_penalty`, that took no note of the segments before."""
    routed_experts_start: int = 0
    """The position in the prompt of the id that the first row of `routed_experts` belongs to."""
    request_class: str = ""
    """What the client sent the request for, as its headers say: see `Origin`."""
    agent: str = ""
    """The client's id of the agent that sent it; empty for the first agent of a session, or if unknown."""
    parent_agent: str = ""
    """The agent that started this one; empty for the first agent of a session, or if unknown."""
    requested_model: str = ""
    """The client's name for `model` if that is another one (`model_aliases`)."""
    scope: tuple[bytes, ...] = ()
    """Digests of the parts of the scope, as `Scope.parts`: they explain why a request does not match."""
    spelling_before: bytes = b""
    """Digest of the request's messages as the client spelled them."""
    spelling: bytes = b""
    """Digest of the assistant's message; empty if the turn may not be found by its text."""
    reasonings: tuple[bytes, ...] = ()
    """`CanonicalMessage.ignored` of each assistant message in `messages` and then of `message`: 16 bytes for
    the reasoning, and more for what is at the ends of the text."""
    calls: tuple[bytes, ...] = ()
    """For each tool call of `message` the digest of its arguments, or b"" if they are not valid JSON; empty
    if all are valid."""
    ids_digest: bytes = b""
    """16 bytes: blake2b of prompt and completion as packed ids; equal for turns with equal ids."""

    @property
    def aborted(self) -> bool:
        """Whether the turn was broken off."""
        return self.finish_reason == ABORTED

    @property
    def completion_tokens(self) -> int:
        """Number of sampled ids."""
        return len(self.completion) // 4


if TYPE_CHECKING:
    TellingTurn = Turn
else:
    TellingTurn = with_facts(Turn, RECORDED, lambda fact: fact.stored.kind, None)
    """A turn with the facts of `EVIDENCE`, each by its name; None for what the engine did not report."""


FOUND_AT_MOST = 16
"""Groups that `find` returns for one key, and turns that it returns for one group."""


class IndexEntry(NamedTuple):
    """One way in which a turn is found again."""

    key: bytes
    """16 bytes."""
    ids: bytes = b""
    """The turn's `ids_digest`, where a turn found by this key may be continued. Empty for keys that only
    explain why nothing was found."""


class IndexedTurn(NamedTuple):
    """A turn to be recorded."""

    turn: Turn
    entries: Sequence[IndexEntry] = ()
    """What finds it."""


class Candidate(NamedTuple):
    """A recorded turn that a request may continue."""

    turn: str
    """Its id; empty if it was evicted."""
    rollout: str
    """Empty if it was evicted."""


class CandidateGroup(NamedTuple):
    """The turns under one key that have equal ids."""

    ids: bytes
    """Their `ids_digest`; empty under keys that only explain."""
    total: int
    """How many there are; all that were evicted count as one."""
    candidates: list[Candidate]
    """At most FOUND_AT_MOST of them, the newest first, those that were evicted last."""

    @property
    def in_one_rollout(self) -> bool:
        """Whether all of them were returned, and belong to one rollout."""
        return (
            self.total <= len(self.candidates)
            and len({candidate.rollout for candidate in self.candidates}) == 1
        )


class Found(NamedTuple):
    """What is under one key."""

    total: int
    """Of all groups, those not returned too."""
    groups: list[CandidateGroup]
    """At most FOUND_AT_MOST, in any order; `total` tells whether there are more."""

    @property
    def all_listed(self) -> bool:
        """Whether all groups were returned."""
        return self.total == sum([group.total for group in self.groups])

    def turns(self, rollout: str | None) -> list[Candidate]:
        """The turns that are there, of one rollout or of all."""
        listed = (candidate for group in self.groups for candidate in group.candidates)
        return [each for each in listed if each.turn and rollout in (None, each.rollout)]

    def of_rollout(self, rollout: str) -> "Found":
        """The turns that belong to a rollout."""
        groups = []
        for group in self.groups:
            kept = [candidate for candidate in group.candidates if candidate.rollout == rollout]
            groups.append(CandidateGroup(group.ids, len(kept), kept))
        return Found(sum(group.total for group in groups), groups)

    def with_candidate(self, ids: bytes, candidate: Candidate) -> "Found":
        """The same with one more turn; unchanged if it is there."""
        groups = {group.ids: group for group in self.groups}
        if any(candidate in group.candidates for group in groups.values()):
            return self
        own = groups.pop(ids, CandidateGroup(ids, 0, []))
        own = CandidateGroup(ids, own.total + 1, [candidate, *own.candidates][:FOUND_AT_MOST])
        # a group that is cut off here makes the match ambiguous, as one that `find` cuts off
        return Found(self.total + 1, [own, *groups.values()][:FOUND_AT_MOST])


NOTHING = Found(0, [])


def new_id() -> str:
    """A unique name of 32 hexadecimal digits. Later names sort after earlier ones if the clocks agree."""
    return f"{time.time_ns():016x}{os.urandom(6).hex()}0000"


def turn_id(request: str, choice: int) -> str:
    """The id of a turn, which is fixed before sampling. The first choice has the request's own id."""
    return f"{request[:-4]}{choice:04x}"


def request_time(turn: str) -> float:
    """When the request of a turn arrived, by the turn's id: in seconds since the epoch; 0 if unknown."""
    try:
        return int(turn[:16], 16) / 1e9 if len(turn) == 32 else 0.0
    except ValueError:
        return 0.0


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian 32-bit integers."""
    return _little_endian(array("i", ids)).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """The inverse of `pack_ids`."""
    return ids_array(packed).tolist()


def ids_array(packed: bytes) -> "array[int]":
    """The ids that `pack_ids` packed, as an array of 32-bit integers."""
    return _little_endian(array("i", packed))


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Log-probabilities as little-endian 32-bit floats, the engine's own precision."""
    return _little_endian(array("f", logprobs)).tobytes()


def unpack_logprobs(packed: bytes) -> list[float]:
    """The inverse of `pack_logprobs`."""
    return _little_endian(array("f", packed)).tolist()


def pack_alternatives(alternatives: Alternatives) -> bytes:
    """Alternatives as MessagePack."""
    return msgspec.msgpack.encode(alternatives)


def unpack_alternatives(packed: bytes) -> Alternatives:
    """The inverse of `pack_alternatives`; empty if they cannot be read."""
    try:
        return _ALTERNATIVES.decode(packed) if packed else []
    except msgspec.DecodeError:
        return []


def _little_endian(values: "array[T]") -> "array[T]":
    """Values in the order of bytes in which they are stored, or as this machine reads them from there."""
    if sys.byteorder == "big":
        values.byteswap()
    return values
