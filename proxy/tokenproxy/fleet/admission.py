"""Which conversations have room in the KV cache of a replica: their contexts must fit into it together.

Where conversations take turns and do not fit, each finds its ids evicted at its next turn, and the engine
reads all of them again. So a turn of a conversation without room waits until others end or are idle for
long. Law, for each replica whose engine reports the size of its cache:

    ids of the contexts with room, those that several contexts begin with counted once  <=  size

Only contexts that grow while their requests run exceed it, and those of conversations that have waited for as
long as they may. An engine evicts the ids that were used least recently; so the conversation that is idle
for longest loses its room first.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tokenproxy.fleet.queue import Priority

if TYPE_CHECKING:
    from tokenproxy.fleet.choosing import Routing
    from tokenproxy.fleet.fleet import Fleet
    from tokenproxy.fleet.replica import Replica

_PIECE_BYTES = 4096
"""Contexts with equal beginnings share pieces of so many bytes of text or JSON, some thousand ids."""


class Context:
    """The ids of a conversation: all that was sent and sampled."""

    __slots__ = ("_estimated", "cache", "ids", "pieces")

    def __init__(self, ids: int = 0, beginning: Sequence[bytes] = ()) -> None:
        """The context of a conversation whose first prompt has about `ids` ids.

        Args:
            beginning: the prompt as JSON, of ids or of messages: equal bytes stand for equal ids.
        """
        self.ids = ids
        self.cache: CacheUse | None = None
        """Where it got room."""
        self._estimated = True
        self.pieces: dict[bytes, int] = {}
        """Ids of the pieces of the first prompt. The key of a piece depends on all bytes before it, too."""
        total, hasher = sum(map(len, beginning)), hashlib.blake2b(digest_size=16, person=b"context")
        for part in beginning:
            for start in range(0, len(part), _PIECE_BYTES):
                piece = part[start : start + _PIECE_BYTES]
                hasher.update(piece)
                self.pieces[hasher.digest()] = ids * len(piece) // total

    @property
    def has_room(self) -> bool:
        """Whether it has room in the cache of an engine that still runs."""
        return self.cache is not None and self.cache.size > 0

    def measure(self, prompt_ids: int, sampled: int) -> None:
        """Set its size after a turn. Until then the ids of the first prompt are an estimate."""
        cache, estimate = self.cache, sum(self.pieces.values())
        if cache is not None:
            cache.count(self, -1)
        if self._estimated and estimate:
            self.pieces = {piece: ids * prompt_ids // estimate for piece, ids in self.pieces.items()}
        self.ids, self._estimated = prompt_ids + sampled, False
        if cache is not None:
            cache.count(self, 1)


class CacheUse:
    """The contexts that have room in the cache of one replica."""

    def __init__(self, size: int = 0, block_ids: int = 0) -> None:
        """A cache in which no context has room yet.

        Args:
            block_ids: ids of one block. The last one of a context is not full, and a request samples more.
        """
        self.size = size
        """Ids that the cache holds; 0 if the engine does not report it, or is gone: every context fits."""
        self._block_ids = block_ids
        self.ids = 0
        """Ids in use."""
        self.contexts = 0
        """How many contexts have room."""
        self._pieces: dict[bytes, tuple[int, int]] = {}
        """By piece, how many of the contexts begin with it, and its ids."""
        self._idle: OrderedDict[Context, float] = OrderedDict()
        """Contexts without a running request, with the time since when; the one idle for longest first."""

    def fits(self, context: Context, idle_before: Callable[[], float]) -> bool:
        """Whether a context has room. Those that are idle for too long lose theirs if need be.

        Args:
            idle_before: since when at the latest contexts are idle for too long.
        """
        if not self.size:
            return True
        while self.ids + context.ids + self._block_ids - self._shared(context) > self.size:
            oldest, since = next(iter(self._idle.items()), (None, 0.0))
            if oldest is None or since > idle_before():
                return False
            self.remove(oldest)
        return True

    def can_hold(self, ids: int) -> bool:
        """Whether the cache is large enough for a context of so many ids, as far as its size is known."""
        return 0 < self.size >= ids + self._block_ids

    def _shared(self, context: Context) -> int:
        """Ids of a context without room that are in use already."""
        return sum([self._pieces[piece][1] for piece in context.pieces if piece in self._pieces])

    def hold(self, context: Context, ids: int) -> None:
        """Give room to a context of so many ids, of which a request begins, whether or not it fits."""
        if context.cache is not None:
            context.cache.remove(context)
        context.ids = ids
        if self.can_hold(ids):
            context.cache = self
            self.contexts += 1
            self.count(context, 1)
        while self.ids > self.size and self._idle:
            self.remove(next(iter(self._idle)))

    def pause(self, context: Context, now: float) -> None:
        """Take note that the last running request of a context ended."""
        self._idle[context] = now

    def remove(self, context: Context) -> None:
        """Take the room from a context that has it here."""
        context.cache = None
        self.contexts -= 1
        self._idle.pop(context, None)
        self.count(context, -1)

    def count(self, context: Context, one: int) -> None:
        """Add the ids of a context (1), or take them out (-1). Each piece counts once."""
        self.ids += one * (context.ids + self._block_ids)
        for piece, ids in context.pieces.items():
            uses, counted = self._pieces.pop(piece, (0, 0))
            self.ids += max(0, uses - 1) * counted - max(0, uses + one - 1) * ids
            if uses + one:
                self._pieces[piece] = (uses + one, ids)


class Admission:
    """Whether one request waits until its conversation has room."""

    def __init__(self, fleet: "Fleet", routing: "Routing") -> None:
        """Decide whether it needs room, with what priority it waits for that, and for how long."""
        self._conversations = fleet.conversations
        self._key = routing.conversation if routing.completion else ""
        active = fleet.conversations.find(self._key)
        self.context = active.context if active else Context(routing.context_ids, routing.beginning)
        self.wait_s = fleet.admission_wait_s - (active.waited_s if active else 0.0)
        self.priority = Priority.ADMITTED
        if self._key and not self.context.has_room and self.wait_s > 0:
            self.context.ids = routing.context_ids
            # an engine refuses a prompt that is larger than its cache
            if any(replica.cache.can_hold(self.context.ids) for replica in fleet.ready):
                self.priority = Priority.RETURNING if active or routing.holder else Priority.NEW

    def with_room(self, replicas: list["Replica"]) -> list["Replica"]:
        """Those of some replicas on which the request may run now."""
        if self.priority is Priority.ADMITTED:
            return replicas
        active = self._conversations.find(self._key)
        if active is not None and active.context.has_room:  # with an equal request
            return replicas
        idle_before = self._conversations.idle_before
        return [replica for replica in replicas if replica.cache.fits(self.context, idle_before)]
