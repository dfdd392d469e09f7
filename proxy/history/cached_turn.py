"""A recorded turn with its exact ids as JSON, and the digests by which requests match it."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from proxy.history.prompt_image import PromptImage
from proxy.history.turn import Turn, unpack_ids
from proxy.history.vocabulary import Problem
from tokenization import ids

UNUSABLE = frozenset(
    {
        Problem.NO_PROMPT_IDS,
        Problem.NO_COMPLETION_IDS,
        Problem.IDS_MISSING,
        Problem.USAGE_MISMATCH,
        Problem.PROMPT_MISMATCH,
        Problem.MEDIA,
        Problem.UNREADABLE_EVIDENCE,
    }
)
"""Problems of a turn because of which its ids cannot be extended."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Reasoning digests of a conversation, turn by turn. Turns share those of their parents."""

    reasonings: tuple[bytes, ...]
    parent: "Lineage | None"

    def all_reasonings(self) -> list[bytes]:
        """One digest for each assistant message of the conversation, in order."""
        parts: list[tuple[bytes, ...]] = []
        at: Lineage | None = self
        while at is not None:
            parts.append(at.reasonings)
            at = at.parent
        return [reasoning for part in reversed(parts) for reasoning in part]


class IdChain:
    """The ids of turns that continue each other, held once: those of the last begin with all others."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data
        """A compact JSON array. It only ever grows at its end."""


@dataclass(frozen=True, slots=True)
class CachedTurn:
    """A recorded turn, ready to be continued."""

    id: str
    rollout: str
    chain: IdChain = field(compare=False)
    """Begins with its ids, prompt and completion."""
    size: int
    """Bytes of its ids as a compact JSON array."""
    count: int
    """Number of its ids."""
    finish_reason: str | None
    stop_reason: str | int | None
    usable: bool
    """Whether the ids are complete: all sampled ids are recorded, and so are all media of the prompt."""
    scope: tuple[bytes, ...]
    """As `Turn.scope`."""
    spelling_before: bytes
    calls: tuple[bytes, ...]
    lineage: Lineage
    hasher: Any = field(compare=False)
    """blake2b over the packed ids, the source of `ids_digest`; a copy is updated with the ids of the next
    turn."""
    replica: str = ""
    """As `Turn.replica`."""
    images: tuple[PromptImage, ...] = ()
    """All images of its prompt."""
    call_ids: tuple[str, ...] = ()
    """The engine's ids of its tool calls."""

    @property
    def ids(self) -> bytes:
        """Prompt and completion as a compact JSON array."""
        data = self.chain.data
        return data if len(data) == self.size else data[: self.size - 1] + b"]"

    @property
    def is_last(self) -> bool:
        """Whether no other turn of its chain continues it."""
        return len(self.chain.data) == self.size

    def begins(self, prompt: bytes) -> bool:
        """Whether a prompt, a compact JSON array, begins with these ids."""
        end = self.size - 1
        return self.usable and prompt[end : end + 1] in (b",", b"]") and prompt[:end] == self.chain.data[:end]


def hash_ids(parent: CachedTurn | None, *packed: bytes) -> Any:
    """The hasher of a turn's ids: a copy of the parent's, updated with the turn's own ids."""
    hasher = parent.hasher.copy() if parent else hashlib.blake2b(digest_size=16, person=b"ids")
    for part in packed:
        hasher.update(part)
    return hasher


def cached_turn(
    turn: Turn, parent: CachedTurn | None, prompt: bytes, hasher: Any, completion: bytes = b""
) -> CachedTurn:
    """Create the cache entry of a turn that was just recorded.

    Args:
        parent: the turn that it continues in the store.
        prompt: its whole prompt as a JSON array; empty if unknown.
        hasher: the hasher of its ids.
        completion: its completion as a compact JSON array, if the caller has it.
    """
    usable = turn.problem not in UNUSABLE and len(prompt) > 2 and (parent is None or parent.usable)
    count = turn.completion_tokens
    sampled = completion if completion and count else ids.dump(unpack_ids(turn.completion))
    whole = ids.concatenate(prompt, sampled) if len(prompt) > 2 else b"[]"
    return CachedTurn(
        turn.id,
        turn.rollout,
        IdChain(whole),
        len(whole),
        turn.prompt_tokens + count,
        turn.finish_reason,
        turn.stop_reason,
        usable,
        turn.scope,
        turn.spelling_before,
        turn.calls,
        Lineage(turn.reasonings, parent.lineage if parent else None),
        hasher,
        turn.replica,
        (*(parent.images if parent else ()), *turn.images),
        call_ids(turn.message),
    )


def read_turn(
    path: Sequence[Turn], in_cache: Callable[[str], CachedTurn | None] = lambda turn: None
) -> CachedTurn:
    """The last turn of a path from the store. Joins only the ids after the last cached turn of the path."""
    base: CachedTurn | None = None
    first = len(path)
    while first > 0 and (base := in_cache(path[first - 1].id)) is None:
        first -= 1
    lineage = base.lineage if base else None
    count, usable = (base.count, base.usable) if base else (0, True)
    parts: list[bytes] = []
    images = list(base.images) if base else []
    for turn in path[first:]:
        lineage = Lineage(turn.reasonings, lineage)
        images += turn.images
        parts += turn.appended, turn.completion
        count += (len(turn.appended) + len(turn.completion)) // 4
        adds_up = count == turn.prompt_tokens + turn.completion_tokens
        usable = usable and adds_up and turn.problem not in UNUSABLE
    assert lineage is not None  # a path has at least one turn
    tokens, last = unpack_ids(b"".join(parts)), path[-1]
    whole = ids.join(base.ids, tokens) if base else ids.dump(tokens)
    return CachedTurn(
        last.id,
        last.rollout,
        IdChain(whole),
        len(whole),
        count,
        last.finish_reason,
        last.stop_reason,
        usable and count > 0,
        last.scope,
        last.spelling_before,
        last.calls,
        lineage,
        hash_ids(base, *parts),
        last.replica,
        tuple(images),
        call_ids(last.message),
    )


class _Call(msgspec.Struct):
    id: str | None = None


class _Message(msgspec.Struct):
    tool_calls: list[_Call] | None = None


_decode_message = msgspec.json.Decoder(_Message).decode


def call_ids(message: bytes) -> tuple[str, ...]:
    """The ids of the tool calls of an assistant message, as JSON; none if they cannot be read."""
    if b'"tool_calls"' not in message:
        return ()
    try:
        return tuple(call.id or "" for call in _decode_message(message).tool_calls or ())
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ()
