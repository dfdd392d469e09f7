"""LRU cache of parsed messages and of turns with their exact ids, limited in bytes; an optimisation only.

A request whose history was seen before parses only its new messages, however many other conversations are
interleaved, and so does a fork. A running checksum of the conversation up to each message finds the history,
and its bytes are compared: a checksum may be equal by chance, or because somebody wants it to be.
"""

import hashlib
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from chat_tokenizer import ids
from chat_tokenizer.equivalences import NO_EQUIVALENTS, Equivalents
from tokenproxy.record.identity import Conversation, ParsedMessage, parse_message
from tokenproxy.record.store import RecordDamaged
from tokenproxy.record.turn import PromptImage, Turn, unpack_ids
from tokenproxy.record.vocabulary import Problem

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

_MESSAGE_BYTES = 1_100
"""Bytes of one parsed message besides its text: its digests, its checksum, and the objects that hold them."""
_TURN_BYTES = 1_500
"""Bytes of a turn besides its ids: its digests, the state of its hasher, and the objects that hold them."""
_CALL_BYTES = 100
"""Bytes of the id of a tool call, and of the same call in a parsed message."""
_MAX_SHARE = 2
"""A chain may take at most this fraction (1/N) of the cache; larger ones are not kept."""

_split = msgspec.json.Decoder(list[msgspec.Raw]).decode


class _History(msgspec.Struct, eq=False):
    """The messages of one conversation. It only ever grows at its end."""

    data: bytes = b""
    """The digest of its equivalents, and the messages as they were sent, with commas in between."""
    messages: list[ParsedMessage] = []
    checksums: tuple[int, ...] = ()
    """Of the conversation up to each message."""
    ends: tuple[int, ...] = ()
    """The bytes of `data` up to there."""
    size: int = 0
    """Bytes that it takes in the cache."""


class Recalled(NamedTuple):
    """A conversation of which the beginning may be known."""

    raws: list[msgspec.Raw]
    equivalents: Equivalents
    data: bytes
    """As that of a history."""
    checksums: list[int]
    """Of the conversation up to each message."""
    messages: list[ParsedMessage]
    """The known ones."""
    ends: tuple[int, ...]
    """The bytes of `data` up to each of them."""
    history: _History | None = None


class IdChain(msgspec.Struct, eq=False):
    """The ids of turns that continue each other, held once: those of the last begin with all others."""

    data: bytes
    """A compact JSON array. It only ever grows at its end."""
    turns: list[str] = []
    """The cached turns of the chain."""
    turn_bytes: int = 0
    """Bytes of these turns besides their ids."""
    size: int = 0
    """Bytes that it takes in the cache."""


class CachedTurn(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A recorded turn with its exact ids, and the digests by which requests match it."""

    id: str
    rollout: str
    chain: IdChain
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
    spelling: bytes
    calls: tuple[bytes, ...]
    reasonings: tuple[bytes, ...]
    """One digest for each assistant message of the conversation, in order."""
    rendered_turns: int
    """Number of the assistant messages that the engine rendered: those before the first recorded turn."""
    hasher: Any
    """blake2b over the packed ids, the source of `ids_digest`; a copy is updated with the ids of the next
    turn."""
    replica: str
    """As `Turn.replica`."""
    images: tuple[PromptImage, ...]
    """All images of its prompt."""
    call_ids: tuple[str, ...]
    """The engine's ids of its tool calls."""

    @property
    def ids(self) -> bytes:
        """Prompt and completion as a compact JSON array."""
        data = self.chain.data
        return data if len(data) == self.size else data[: self.size - 1] + b"]"

    def begins(self, prompt: bytes) -> bool:
        """Whether a prompt, a compact JSON array, begins with these ids."""
        end = self.size - 1
        return self.usable and prompt[end : end + 1] in (b",", b"]") and prompt[:end] == self.chain.data[:end]


_UNCHANGED = (
    *("id", "rollout", "finish_reason", "stop_reason", "scope", "spelling_before", "spelling", "calls"),
    "replica",
)
"""The fields of a turn that are cached as they are."""


def hash_ids(parent: CachedTurn | None, *packed: bytes) -> Any:
    """The hasher of a turn's ids: a copy of the parent's, updated with the turn's own ids."""
    hasher = parent.hasher.copy() if parent else hashlib.blake2b(digest_size=16, person=b"ids")
    for part in packed:
        hasher.update(part)
    return hasher


def read_turn(path: Sequence[Turn], parent: CachedTurn | None = None) -> CachedTurn:
    """The last turn of a path from the store.

    Args:
        parent: what the first turn of the path continues; None if the path is complete.

    Raises:
        RecordDamaged: they are not the ids that the turn was recorded with.
    """
    parts: list[bytes] = []
    count, complete = parent.count if parent else 0, True
    for turn in path:
        parts += turn.appended, turn.completion
        count += (len(turn.appended) + len(turn.completion)) // 4
        complete = complete and count == turn.prompt_tokens + turn.completion_tokens
    hasher = hash_ids(parent, *parts)
    if path[-1].ids_digest not in (b"", hasher.digest()):
        raise RecordDamaged(f"turn {path[-1].id} has other ids in the store than it was recorded with")
    # part by part: a list of all ids at once would be built in memory that was never used before
    own = b"[%s]" % b",".join([ids.dump(unpack_ids(part))[1:-1] for part in parts if part])
    data = ids.concatenate(parent.ids, own) if parent else own
    complete = complete and count > 0
    return cached_turn(path, parent, data, hasher, complete=complete)


def cached_turn(
    path: Sequence[Turn], parent: CachedTurn | None, data: bytes, hasher: Any, *, complete: bool = True
) -> CachedTurn:
    """The last turn of a path that continues a cached turn.

    Args:
        data: its ids as a compact JSON array.
        hasher: see `hash_ids`.
        complete: whether these are all ids of the path.
    """
    turn = path[-1]
    usable = parent is None or parent.usable
    reasonings = [*(parent.reasonings if parent else ())]
    images = [*(parent.images if parent else ())]
    for each in path:
        usable = usable and each.problem not in UNUSABLE
        reasonings += each.reasonings
        images += each.images
    return CachedTurn(
        **{name: getattr(turn, name) for name in _UNCHANGED},
        chain=IdChain(data),
        size=len(data),
        count=turn.prompt_tokens + turn.completion_tokens,
        usable=usable and complete,
        reasonings=tuple(reasonings),
        rendered_turns=parent.rendered_turns if parent else len(path[0].reasonings) - 1,
        hasher=hasher,
        images=tuple(images),
        call_ids=_call_ids(turn.message),
    )


class _Call(msgspec.Struct):
    id: str | None = None


class _Message(msgspec.Struct):
    tool_calls: list[_Call] | None = None


_decode_message = msgspec.json.Decoder(_Message).decode


def _call_ids(message: bytes) -> tuple[str, ...]:
    """The ids of the tool calls of an assistant message, as JSON; none if they cannot be read."""
    if b'"tool_calls"' not in message:
        return ()
    try:
        return tuple(call.id or "" for call in _decode_message(message).tool_calls or ())
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ()


class TurnCache:
    """Holds at most `max_bytes` of parsed messages and of turns with their exact ids. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.size = 0
        """Bytes in use, as estimated."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[_History | IdChain, None] = OrderedDict()
        """The least recently used first."""
        self._histories: dict[int, _History] = {}
        """By the checksum of a conversation up to a message: a history that may begin with it."""
        self._turns: dict[str, CachedTurn] = {}
        self._lock = threading.Lock()

    def recall(self, messages: bytes, equivalents: Equivalents = NO_EQUIVALENTS) -> Recalled:
        """Split a JSON array of messages, and find the history with which it begins.

        Args:
            equivalents: those of the conversation's tools and template.

        Raises:
            msgspec.DecodeError, UnicodeDecodeError: the bytes are not a JSON array.
        """
        raws = _split(messages) if messages else []
        digest, checksums = equivalents.digest, list[int]()
        data, checksum = b",".join((digest, *raws)), zlib.crc32(digest)
        for raw in raws:
            checksum = zlib.crc32(raw, checksum)
            checksums.append(checksum)
        with self._lock:
            found = next(filter(self._histories.__contains__, reversed(checksums)), None)
            if found is not None:
                history = self._histories[found]
                count = history.checksums.index(found) + 1
                ends = history.ends[:count]
                if data.startswith(history.data[: ends[-1]]):
                    self._entries.move_to_end(history)
                    return Recalled(
                        raws, equivalents, data, checksums, history.messages[:count], ends, history
                    )
        return Recalled(raws, equivalents, data, checksums, [], ())

    def parse(self, recalled: Recalled) -> Conversation:
        """Parse the messages that are not cached.

        Raises:
            msgspec.DecodeError, UnicodeDecodeError: one of them is not a JSON object.
            InvalidMessages: one of them is not a chat message.
        """
        raws, parsed, ends = recalled.raws, [*recalled.messages], [*recalled.ends]
        end = ends[-1] if ends else len(recalled.equivalents.digest)
        for raw in raws[len(parsed) :]:
            message, before = bytes(raw), parsed[-1] if parsed else None
            parsed.append(parse_message(message, len(parsed), before, recalled.equivalents))
            end += 1 + len(message)
            ends.append(end)
        if len(parsed) > len(recalled.messages):
            self._keep(recalled, parsed, ends)
        return Conversation(raws, parsed, recalled.equivalents)

    def _keep(self, recalled: Recalled, messages: list[ParsedMessage], ends: list[int]) -> None:
        """Keep a conversation: as the end of the history that it continues, else, as a fork, in its own."""
        size, known = len(recalled.data) + _MESSAGE_BYTES * len(messages), len(recalled.messages)
        if size * _MAX_SHARE > self._max_bytes:
            return
        with self._lock:
            last = self._histories.get(recalled.checksums[-1])
            if last is not None and last.data == recalled.data:
                return  # an equal request kept it meanwhile
            history = recalled.history
            if history is None or len(history.messages) != known or history not in self._entries:
                history = _History()
            self.size += size - history.size
            history.data, history.messages, history.size = recalled.data, messages, size
            history.checksums, history.ends = tuple(recalled.checksums), tuple(ends)
            self._histories |= dict.fromkeys(recalled.checksums[known:], history)
            self._entries[history] = None
            self._shrink()

    def turn(self, turn_id: str) -> CachedTurn | None:
        """A recorded turn with its ids, if it is cached."""
        with self._lock:
            found = self._turns.get(turn_id)
            if found is not None:
                self._entries.move_to_end(found.chain)
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
            before, chain = self._turns.get(parent or ""), turn.chain
            if before is not None and before.size == len(before.chain.data):
                chain = before.chain
            own = _TURN_BYTES + 8 * len(turn.reasonings) + _CALL_BYTES * len(turn.call_ids)
            images = sum([len(image.data) for image in turn.images])
            size = turn.size + images + chain.turn_bytes + own
            if size * _MAX_SHARE > self._max_bytes:
                return
            if chain is not turn.chain:
                chain.data = turn.chain.data
                turn = replace(turn, chain=chain)
            chain.turns.append(turn.id)
            chain.turn_bytes += own
            self.size += size - chain.size
            chain.size = size
            self._turns[turn.id] = turn
            self._entries[chain] = None
            self._entries.move_to_end(chain)
            self._shrink()

    def drop(self, rollout: str) -> None:
        """Remove the turns of a deleted rollout."""
        with self._lock:
            for chain in {turn.chain for turn in self._turns.values() if turn.rollout == rollout}:
                self._evict(chain)

    def _shrink(self) -> None:
        while self.size > self._max_bytes:
            self._evict(next(iter(self._entries)))

    def _evict(self, entry: _History | IdChain) -> None:
        del self._entries[entry]
        self.size -= entry.size
        if isinstance(entry, _History):
            for checksum in entry.checksums:
                if self._histories.get(checksum) is entry:
                    del self._histories[checksum]
            return
        for turn in entry.turns:
            del self._turns[turn]
        entry.turns, entry.size = [], 0
