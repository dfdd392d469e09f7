"""LRU cache of parsed conversations and of turns with their ids, limited in bytes; an optimisation only.

A conversation is found by a running hash at each message boundary: a request whose history was seen before
parses only its new messages, however many other conversations are interleaved, and a fork is found at the
message where it leaves. Entries form trees (a conversation continues a shorter one); using one uses all it
continues, after it, so the least recently used entry never has a descendant here, and evicting it frees its
memory.
"""

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace

import msgspec

from proxy.history.cached_turn import CachedTurn, IdChain
from proxy.history.conversation import Conversation, ParsedMessage, parse_message
from tokenization.canonical import NO_DEFAULTS, ArgumentDefaults

_split = msgspec.json.Decoder(list[msgspec.Raw]).decode

_MESSAGE_BYTES = 900
"""Bytes of one parsed message: its digests, the hash of its boundary, and the objects that hold them."""
_ENTRY_BYTES = 600
"""Bytes of an entry besides its messages or ids."""
_MAX_SHARE = 2
"""An entry may take at most this fraction (1/N) of the cache; larger ones are not kept."""


@dataclass(slots=True, eq=False)
class _Segment:
    """Messages that one request added to a cached conversation."""

    parent: "_Segment | None"
    start: int
    """Messages before these; the first `start` messages of the conversation are the parent's."""
    messages: list[ParsedMessage]
    boundaries: list[bytes]
    """The running hash after each of the messages."""


@dataclass(slots=True)
class _Lru:
    """Entries with their bytes, the least recently used first."""

    max_bytes: int
    size: int = 0
    entries: "OrderedDict[_Segment | IdChain, int]" = field(default_factory=OrderedDict)

    def use(self, entry: "_Segment | IdChain") -> None:
        self.entries.move_to_end(entry)

    def add(self, entry: "_Segment | IdChain", size: int) -> None:
        self.size += size - self.entries.pop(entry, 0)
        self.entries[entry] = size

    def remove(self, entry: "_Segment | IdChain") -> None:
        self.size -= self.entries.pop(entry, 0)


class TurnCache:
    """Holds at most `max_bytes` of parsed conversations and of turns with their exact ids. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._lru = _Lru(max_bytes)
        self._boundaries: dict[bytes, tuple[_Segment, int]] = {}
        self._turns: dict[str, CachedTurn] = {}
        self._chains: dict[IdChain, list[str]] = {}
        """The turns of each chain."""
        self._by_rollout: dict[str, set[IdChain]] = {}
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes in use, as estimated."""
        return self._lru.size

    def parse(self, messages: bytes, defaults: ArgumentDefaults = NO_DEFAULTS) -> Conversation:
        """The conversation in a JSON array of messages. Parses only the messages that are not cached.

        Args:
            defaults: those of the conversation's tools.

        Raises:
            msgspec.DecodeError, UnicodeDecodeError: the bytes are not a JSON array of objects.
            InvalidMessages: one of them is not a chat message.
        """
        raws = _split(messages) if messages else []
        hashes = _boundary_hashes(raws, defaults.digest)
        parsed, segment = self._longest(hashes)
        start = len(parsed)
        for index in range(start, len(raws)):
            before = parsed[-1] if parsed else None
            parsed.append(parse_message(bytes(raws[index]), index, before, defaults))
        if start < len(raws):
            self._keep(_Segment(segment, start, parsed[start:], hashes[start:]))
        return Conversation(raws, parsed, defaults)

    def turn(self, turn_id: str) -> CachedTurn | None:
        """A recorded turn with its ids, if it is cached."""
        with self._lock:
            found = self._turns.get(turn_id)
            if found is not None:
                self._lru.use(found.chain)
            return found

    def put(self, turn: CachedTurn, parent: str | None = None) -> None:
        """Keep a turn.

        Args:
            parent: the turn of its rollout that it continues. Both are held in one chain if no other turn
                continues the parent.
        """
        with self._lock:
            if turn.id in self._turns:
                return
            before = self._turns.get(parent) if parent is not None else None
            chain = before.chain if before is not None and before.is_last else turn.chain
            members = self._chains.get(chain, [])
            size = turn.size + _ENTRY_BYTES * (len(members) + 1) + sum(len(each.data) for each in turn.images)
            if size * _MAX_SHARE > self._lru.max_bytes:
                return
            if chain is not turn.chain:
                chain.data = turn.chain.data
                turn = replace(turn, chain=chain)
            members.append(turn.id)
            self._turns[turn.id] = turn
            self._chains[turn.chain] = members
            self._by_rollout.setdefault(turn.rollout, set()).add(turn.chain)
            self._lru.add(turn.chain, size)
            self._shrink()

    def drop(self, rollout: str) -> None:
        """Remove the turns of a deleted rollout."""
        with self._lock:
            for chain in list(self._by_rollout.get(rollout, ())):
                self._evict(chain)

    def _longest(self, hashes: list[bytes]) -> tuple[list[ParsedMessage], _Segment | None]:
        """The parsed messages of the longest cached beginning, and the segment in which it ends."""
        with self._lock:
            found = next((hit for key in reversed(hashes) if (hit := self._boundaries.get(key))), None)
            if found is None:
                return [], None
            segment: _Segment | None = found[0]
            end = found[1]
            parts: list[list[ParsedMessage]] = []
            while segment is not None:
                parts.append(segment.messages[: end - segment.start])
                end = segment.start
                self._lru.use(segment)
                segment = segment.parent
            return [message for part in reversed(parts) for message in part], found[0]

    def _keep(self, segment: _Segment) -> None:
        size = _MESSAGE_BYTES * len(segment.messages) + _ENTRY_BYTES
        with self._lock:
            if size * _MAX_SHARE > self._lru.max_bytes or not self._is_kept(segment.parent):
                return
            for offset, key in enumerate(segment.boundaries, 1):
                # an entry with this key is the same conversation, parsed by a concurrent request
                self._boundaries.setdefault(key, (segment, segment.start + offset))
            self._lru.add(segment, size)
            ancestor = segment.parent
            while ancestor is not None:
                self._lru.use(ancestor)
                ancestor = ancestor.parent
            self._shrink()

    def _is_kept(self, segment: _Segment | None) -> bool:
        return segment is None or segment in self._lru.entries

    def _shrink(self) -> None:
        while self._lru.size > self._lru.max_bytes:
            self._evict(next(iter(self._lru.entries)))

    def _evict(self, entry: _Segment | IdChain) -> None:
        self._lru.remove(entry)
        if isinstance(entry, IdChain):
            rollout = ""
            for turn in self._chains.pop(entry):
                rollout = self._turns.pop(turn).rollout
            of_rollout = self._by_rollout[rollout]
            of_rollout.discard(entry)
            if not of_rollout:
                del self._by_rollout[rollout]
            return
        for key in entry.boundaries:
            if self._boundaries.get(key, (None,))[0] is entry:
                del self._boundaries[key]


def _boundary_hashes(raws: list[msgspec.Raw], start: bytes) -> list[bytes]:
    """The running hash of a conversation after each message: equal for equal bytes of all messages so far."""
    running = hashlib.blake2b(start, digest_size=16, person=b"boundary")
    hashes = []
    for raw in raws:
        view = memoryview(raw)
        running.update(view.nbytes.to_bytes(8, "little"))
        running.update(view)
        hashes.append(running.copy().digest())
    return hashes
