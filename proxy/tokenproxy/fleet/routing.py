"""The facts that decide which replica a request runs on, and whether it may run again."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Of one request."""

    conversation: str = ""
    """A key that is equal for all turns of the conversation; empty if the conversation cannot be told."""
    holder: str = ""
    """Name of the replica that holds the ids of its history; empty if none does."""
    held_since: float = 0.0
    """When that replica served them, in seconds since the epoch; 0 if unknown."""
    ids: int = 0
    """Approximate number of ids in its prompt."""
    reused: int = 0
    """Number of these ids in the holder's prefix cache."""
    tenant: str = ""
    repeatable: bool = True
    """Whether it may run again if no byte of a response was sent to the client."""
    samples: bool = True
    """Whether the engine's weights matter for it. Others are served while the fleet is paused, too."""
    completion: bool = False
    """Whether a successful response must be a chat completion."""
    digest: Callable[[], bytes] | None = None
    """Computes a digest that equal requests share; None for requests that cannot break an engine."""


BYTES_PER_ID = 4
"""Approximate number of a request's bytes for each id, where the ids are not counted."""


def body_digest(path: str, body: bytes) -> bytes:
    """A digest of 16 bytes that equal requests share."""
    return hashlib.blake2b(body, digest_size=16, person=path.encode()[-16:]).digest()
