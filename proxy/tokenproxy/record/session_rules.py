"""What a session demands of its requests: limits on their number and time, and one sampling policy."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tokenproxy.record.store import Session

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
