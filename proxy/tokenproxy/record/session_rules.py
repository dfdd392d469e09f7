"""What a session demands of its requests (limits on their number and time, and one sampling policy), and how
many of them were refused.

The refusals of named sessions are counted in the store, because another process may be asked why nothing was
recorded.
"""

from contextlib import suppress
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tokenproxy.base.request import EchoPolicy
from tokenproxy.record.store import Session, Store, StoreError

_SPACE = "refusals"
_KEEP_S = 86_400.0
_CHARACTERS = 200
_TRIES = 64
"""How often a refusal is counted again because another one was counted at the same time."""
_Count = Annotated[int, Meta(ge=0, lt=2**53)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class SessionLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The most that a session may use; None for no limit. A turn that begins before runs to its end."""

    turns: _Count | None = None
    """Recorded turns; each choice of a request is one."""
    sampled_ids: _Count | None = None
    """In all recorded turns together."""
    seconds: Annotated[float, Meta(ge=0)] | None = None
    """Since the request of its first recorded turn arrived."""

    def reached(self, session: Session, now: float) -> str:
        """The name of the first limit that a session has reached; empty if there is none.

        Args:
            now: seconds since the epoch.
        """
        seconds = now - session.first_turn if session.turns else -1.0
        used = {"turns": session.turns, "sampled_ids": session.sampled_ids, "seconds": seconds}
        limits = ((name, getattr(self, name)) for name in used)
        return next((name for name, limit in limits if limit is not None and used[name] >= limit), "")


class SamplingPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sampling parameters that all turns of a session share, with vLLM's bounds."""

    mode: Literal["enforce", "note"] = "enforce"
    """Whether they replace those of a request, or turns that were sampled with others are only noted."""
    temperature: Annotated[float, Meta(ge=0)] | UnsetType = UNSET
    top_p: Annotated[float, Meta(gt=0, le=1)] | UnsetType = UNSET
    top_k: Annotated[int, Meta(ge=-1)] | UnsetType = UNSET
    min_p: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET
    presence_penalty: _Penalty | UnsetType = UNSET
    frequency_penalty: _Penalty | UnsetType = UNSET
    repetition_penalty: Annotated[float, Meta(gt=0)] | UnsetType = UNSET


class SessionRules(msgspec.Struct, frozen=True):
    """The fields with rules in a session's description."""

    limits: SessionLimits | None = None
    policy: SamplingPolicy | None = None
    echo: EchoPolicy | None = None


class Refusals(msgspec.Struct, frozen=True):
    """How many requests of a session were refused, each within a day of the one before."""

    refusals: int = 0
    last_refusal: str = ""
    """Status and beginning of the message."""


_decode = msgspec.json.Decoder(Refusals).decode


async def read_refusals(store: Store, rollout: str) -> Refusals:
    """The refusals of a rollout. Raises StoreError."""
    return _read(store, rollout, (await store.get(_SPACE, [rollout])).get(rollout))


def _read(store: Store, rollout: str, held: bytes | None) -> Refusals:
    return store.unreadable.read(f"{_SPACE} {rollout}", _decode, held or b"{}") or Refusals()


async def count_refusal(store: Store, rollout: str, status: int, message: str) -> None:
    """Count a refused request, if it has a rollout and the store responds."""
    if not rollout:
        return
    with suppress(StoreError):
        for _ in range(_TRIES):
            held = (await store.get(_SPACE, [rollout])).get(rollout)
            before = _read(store, rollout, held)
            refusals = Refusals(before.refusals + 1, f"{status} {message}"[:_CHARACTERS])
            encoded = msgspec.json.encode(refusals)
            if await store.put(_SPACE, rollout, encoded, keep_s=_KEEP_S, before=held):
                return
