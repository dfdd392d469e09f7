"""Chooses the replica for a request: the one that holds its conversation or prompt, unless it is far busier.

How many requests run on each replica is compared: a slow replica keeps its requests for longer, so that it
gets fewer of them. Equally busy ones share the active conversations: those that wait for their tools, too.

Each process counts its own conversations. A process that gets one for the first time reads the replica that
holds its ids from the record of the last turn. A request's conversation names the replica with its ids;
without one, the text of its prompt does. A prompt is a compact JSON array, and one that extends another
begins with the same bytes. So a digest of the first 2^k bytes is kept for each k, with the replicas that
served them. The longest equal beginning decides.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chat_tokenizer.cache import BoundedCache

if TYPE_CHECKING:
    from tokenproxy.fleet.replica import Replica

BYTES_PER_ID = 4
"""Approximate number of a request's bytes for each id, where the ids are not counted."""
_TIMES_BUSIER = 2
"""How many times as many requests as another replica, and four more, the replica of a conversation must run
before the conversation moves: the other replica has to read its whole history."""
_MORE_REQUESTS = 4
_SHORTEST_EXPONENT = 10
"""Of the shortest beginning: 1 KiB, some 170 ids."""
_REMEMBERED = 65_536
_HOLDERS = 8
"""Replicas that are remembered for one beginning: many conversations may share a system prompt."""

Choose = Callable[[Sequence["Replica"], str, Callable[[str], int]], "Replica"]
"""From replicas, the name of the conversation's holder, which may be empty, and the number of active
conversations by replica, to the chosen replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The facts of one request that decide where it runs, and whether it may run again."""

    conversation: str = ""
    """A key that is equal for all turns of the conversation; empty if the conversation cannot be told."""
    holder: str = ""
    """Name of the replica that holds the ids of its history; empty if none does."""
    prompts: Sequence[bytes] = ()
    """Its prompts that continue nothing recorded, as JSON arrays of ids."""
    ids: int = 0
    """Approximate number of ids in its prompt."""
    context_ids: int = 0
    """The same, or 0 if images make that unknown."""
    beginning: Sequence[bytes] = ()
    """Its prompt, of ids or of messages, as parts of JSON: those of others begin with the same bytes."""
    tenant: str = ""
    model: str = ""
    """The model that it names; empty if none."""
    repeatable: bool = True
    """Whether it may run again if no byte of a response was sent to the client."""
    samples: bool = True
    """Whether the engine's weights matter for it. Others are served while the fleet is paused, too."""
    completion: bool = False
    """Whether a successful response must be a chat completion."""
    goes_on: bool = False
    """Whether it goes on elsewhere if its engine breaks off after the beginning of the response."""
    digest: Callable[[], bytes] | None = None
    """Computes a digest that the request and its repetitions share; None if it cannot break an engine."""


def request_digest(path: str, body: bytes, owner: str) -> bytes:
    """A digest of 16 bytes that equal requests of one owner share: a session, else a tenant."""
    hasher = hashlib.blake2b(f"{path}\n{owner}\n".encode(), digest_size=16)
    hasher.update(body)
    return hasher.digest()


def sticky_least_loaded(
    replicas: Sequence["Replica"], holder: str, conversations: Callable[[str], int]
) -> "Replica":
    """The holder of the conversation, unless it is far busier than the least busy replica."""
    best = min(replicas, key=lambda each: (each.load.requests, conversations(each.name), random.random()))
    stay = next((each for each in replicas if each.name == holder), best)
    return best if stay.load.requests > _TIMES_BUSIER * best.load.requests + _MORE_REQUESTS else stay


class PrefixCaches:
    """The replicas that served the beginnings of prompts."""

    def __init__(self) -> None:
        self._holders: BoundedCache[bytes, tuple[str, ...]] = BoundedCache(_REMEMBERED)
        """The replicas that served each beginning, the latest last."""

    def find(self, prompt: bytes) -> tuple[str, ...]:
        """The replicas that served the longest known beginning of a prompt."""
        found = [self._holders.get(digest) or () for digest in _beginnings(prompt)]
        return next((holders for holders in reversed(found) if holders), ())

    def note(self, prompt: bytes, replica: str) -> None:
        """Take note that a replica served a prompt."""
        for digest in _beginnings(prompt):
            others = [each for each in self._holders.get(digest) or () if each != replica]
            self._holders.put(digest, (*others[1 - _HOLDERS :], replica))


def _beginnings(prompt: bytes) -> Iterator[bytes]:
    """Yield a digest of each beginning of a prompt, the shortest first."""
    hasher, done = hashlib.blake2b(digest_size=16, person=b"prefix"), 0
    for exponent in range(_SHORTEST_EXPONENT, len(prompt).bit_length()):
        hasher.update(prompt[done : 1 << exponent])
        done = 1 << exponent
        yield hasher.copy().digest()
