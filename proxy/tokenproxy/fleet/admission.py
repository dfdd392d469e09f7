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
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenproxy.fleet.queue import Lack, Priority

if TYPE_CHECKING:
    from tokenproxy.fleet.choosing import Routing
    from tokenproxy.fleet.fleet import Fleet
    from tokenproxy.fleet.replica import Replica

IDLE_S = 60.0
"""Seconds after its last request until a conversation that was not ended counts as over."""
_TIMES_LONGER = 4
"""How many times as long as the median pause between two turns an idle conversation keeps its room."""
_SHORTEST_S = 1.0
_FIRST_PAUSE_S = 5.0
"""How long conversations keep their room before any of the fleet had a second turn."""
_PAUSES = 255
_PIECE_BYTES = 4096
"""Contexts with equal beginnings share pieces of so many bytes of text or JSON, some thousand ids."""


class ActiveConversation:
    """A conversation, with the ids of its context: all that was sent and sampled."""

    __slots__ = ("_estimated", "cache", "ids", "pieces", "replica", "running", "used", "waited_s")

    def __init__(self, ids: int = 0, beginning: Sequence[bytes] = ()) -> None:
        """A conversation that is not active yet, and whose first prompt has about `ids` ids.

        Args:
            beginning: the prompt as JSON, of ids or of messages: equal bytes stand for equal ids.
        """
        self.replica = ""
        """Name of the one that got its last request."""
        self.used = 0.0
        """When a request of it last began or ended."""
        self.running = 0
        """Number of its requests that run."""
        self.waited_s = 0.0
        """How long it waited for room in a cache."""
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
        self._idle: dict[ActiveConversation, None] = {}
        """Conversations without a running request, the one idle for longest first."""

    def fits(self, context: ActiveConversation, idle_before: Callable[[], float]) -> bool:
        """Whether a context has room. Those that are idle for too long lose theirs if need be.

        Args:
            idle_before: since when at the latest contexts are idle for too long.
        """
        if not self.size:
            return True
        while self.need(context)[0] > self.size - self.ids:
            if not self._evict(idle_before):
                return False
        return True

    def room(self, idle_before: Callable[[], float]) -> float:
        """Ids that are free for a context, after all that are idle for too long lost their room."""
        while self._evict(idle_before):
            pass
        return self.size - self.ids if self.size else math.inf

    def _evict(self, idle_before: Callable[[], float]) -> bool:
        oldest = next(iter(self._idle), None)
        if oldest is None or oldest.used > idle_before():
            return False
        self.remove(oldest)
        return True

    def can_hold(self, ids: int) -> bool:
        """Whether the cache is large enough for a context of so many ids, as far as its size is known."""
        return 0 < self.size >= ids + self._block_ids

    def need(self, context: ActiveConversation) -> tuple[int, bytes, bytes]:
        """Ids of room that a context without room takes, and between which of its pieces those begin.

        Pieces in use are free. A context that has a piece has all pieces before it, too.
        """
        ids, last = max(1, context.ids + self._block_ids), b""
        for piece in context.pieces:
            if piece not in self._pieces:
                return ids, last, piece
            ids, last = max(1, ids - self._pieces[piece][1]), piece
        return ids, last, b""

    def hold(self, context: ActiveConversation, ids: int) -> list[bytes]:
        """Give room to a context of so many ids, of which a request begins, whether or not it fits.

        Returns its pieces that were not in use.
        """
        if context.cache is not None:
            context.cache.remove(context)
        context.ids = ids
        fresh = [piece for piece in context.pieces if piece not in self._pieces]
        if self.can_hold(ids):
            context.cache = self
            self.contexts += 1
            self.count(context, 1)
        while self.ids > self.size and self._idle:
            self.remove(next(iter(self._idle)))
        return fresh

    def pause(self, context: ActiveConversation) -> None:
        """Take note that the last running request of a conversation ended."""
        self._idle[context] = None

    def remove(self, context: ActiveConversation) -> None:
        """Take the room from a context that has it here."""
        context.cache = None
        self.contexts -= 1
        self._idle.pop(context, None)
        self.count(context, -1)

    def count(self, context: ActiveConversation, one: int) -> None:
        """Add the ids of a context (1), or take them out (-1). Each piece counts once."""
        self.ids += one * (context.ids + self._block_ids)
        for piece, ids in context.pieces.items():
            uses, counted = self._pieces.pop(piece, (0, 0))
            self.ids += max(0, uses - 1) * counted - max(0, uses + one - 1) * ids
            if uses + one:
                self._pieces[piece] = (uses + one, ids)


@dataclass(slots=True)
class Conversations:
    """Active conversations, by a key that is equal for all turns of a conversation."""

    idle_s: float = IDLE_S
    clock: Callable[[], float] = time.monotonic
    _active: OrderedDict[str, ActiveConversation] = field(default_factory=OrderedDict)
    """The one used least recently first."""
    _counts: Counter[str] = field(default_factory=Counter)
    """How many are on each replica."""
    _pauses: deque[float] = field(default_factory=lambda: deque(maxlen=_PAUSES))
    """Seconds between two turns of a conversation, the latest last; infinite where no other turn followed."""
    _first_finish: float = math.inf

    def find(self, key: str) -> ActiveConversation | None:
        """A conversation; None if it is not active."""
        return self._active.get(key)

    def begin(
        self, routing: "Routing", replica: "Replica", first: ActiveConversation | None = None
    ) -> list[Hashable]:
        """Count a request of a conversation that is sent to a replica, whose cache gives it room.

        Args:
            first: the conversation, if it is not active.

        Returns: the keys for `FairQueue.renew`: requests that share them with it need less room now.
        """
        self._expire()
        key = routing.conversation
        active = self._active.get(key)
        if active is None:
            active = self._active[key] = first or ActiveConversation()
            self._counts[replica.name] += 1
        else:
            if routing.completion and not active.running:
                self._pauses.append(self.clock() - active.used)
            if active.replica != replica.name:
                self._counts.update({active.replica: -1, replica.name: 1})
        active.replica = replica.name
        fresh = replica.cache.hold(active, routing.context_ids) if routing.completion else []
        active.running += 1
        self._use(key, active)
        return [key, *fresh]

    @contextmanager
    def waiting(self, key: str) -> Iterator[None]:
        """Let a request of a conversation wait for room: that is no pause, and counts for the bound."""
        active, began = self._active.get(key), self.clock()
        if active is not None:
            if not active.running:
                self._pauses.append(began - active.used)
            active.running += 1
        try:
            yield
        finally:
            if active is not None and self._active.get(key) is active:
                self.finish(key)
            if (active := self._active.get(key)) is not None:
                active.waited_s += self.clock() - began

    def finish(self, key: str) -> None:
        """Count a request of a conversation as complete."""
        if (active := self._active.get(key)) is not None:
            active.running = max(0, active.running - 1)
            self._use(key, active)
            self._first_finish = min(self._first_finish, active.used)
            if active.cache is not None and not active.running:
                active.cache.pause(active)

    def measure(self, key: str, prompt_ids: int, sampled: int) -> None:
        """Take note of how many ids a turn has: its prompt's, and those that were sampled."""
        if (active := self._active.get(key)) is not None:
            active.measure(prompt_ids, sampled)

    def end(self, key: str) -> bool:
        """Remove a conversation, because no request follows. False if it was not active."""
        active = self._active.pop(key, None)
        if active is not None:
            self._counts[active.replica] -= 1
            if active.cache is not None:
                active.cache.remove(active)
        return active is not None

    def idle_before(self) -> float:
        """Since when at the latest a conversation is idle that loses its room to one that waits.

        If no turn follows most turns, that is now: what was sampled once is not needed again.
        """
        if not self._pauses:
            waits = self.clock() < self._first_finish + _FIRST_PAUSE_S
            return -math.inf if waits else self.clock()
        usual_s = sorted(self._pauses)[len(self._pauses) // 2]
        return self.clock() - (max(_SHORTEST_S, _TIMES_LONGER * usual_s) if usual_s < math.inf else 0.0)

    def count(self, replica: str) -> int:
        """Number of active conversations on a replica."""
        self._expire()
        return self._counts[replica]

    def _expire(self) -> None:
        now = self.clock()
        while self._active:
            key, active = next(iter(self._active.items()))
            if active.used >= now - self.idle_s:
                return
            if active.running:
                self._use(key, active)
            else:
                self._pauses.append(math.inf)
                self.end(key)

    def _use(self, key: str, active: ActiveConversation) -> None:
        active.used = self.clock()
        self._active.move_to_end(key)


class Admission:
    """Whether one request waits until its conversation has room."""

    def __init__(self, fleet: "Fleet", routing: "Routing") -> None:
        """Decide whether it needs room, with what priority it waits for that, and for how long."""
        self._conversations = fleet.conversations
        self._key = routing.conversation if routing.completion else ""
        active = fleet.conversations.find(self._key)
        self.conversation = active or ActiveConversation(routing.context_ids, routing.beginning)
        self.wait_s = fleet.admission_wait_s - self.conversation.waited_s
        self.priority = Priority.ADMITTED
        self.lack = Lack(measure=self._measure)
        if self._key and not self.conversation.has_room and self.wait_s > 0:
            self.conversation.ids = routing.context_ids
            # an engine refuses a prompt that is larger than its cache
            if any(replica.cache.can_hold(self.conversation.ids) for replica in fleet.ready):
                self.priority = Priority.RETURNING if active or routing.holder else Priority.NEW

    def with_room(self, replicas: list["Replica"]) -> list["Replica"]:
        """Those of some replicas on which the request may run now. If none has room for it, notes that."""
        self.lack.room = 0
        if self.priority is Priority.ADMITTED:
            return replicas
        active = self._conversations.find(self._key)
        if active is not None and active.has_room:  # with an equal request
            return replicas
        idle_before = self._conversations.idle_before
        roomy = [replica for replica in replicas if replica.cache.fits(self.conversation, idle_before)]
        for replica in [] if roomy else replicas:
            self._measure(replica.cache)
        return roomy

    def _measure(self, cache: CacheUse) -> None:
        """Take note of how much room it needs in a cache, if it needs more in those that were measured."""
        active = self._conversations.find(self._key)
        if active is not None and active.has_room:
            self.lack.room = 0
            return
        room, last, following = cache.need(self.conversation)
        if not self.lack.room or room < self.lack.room:
            self.lack.room, self.lack.kind, self.lack.keys = room, last, (self._key, following)
