"""Turns, values and index entries as bytes, and what all stores compute alike.

A turn is a map of MessagePack, or a Zstandard frame that holds one. The first byte tells which: a frame
begins with 0x28, which is an integer in MessagePack.
"""

import asyncio
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain

import msgspec
from msgspec.structs import replace

from tokenproxy.base.evidence import RECORDED
from tokenproxy.record.store import DAMAGED, RecordDamaged, Unreadable
from tokenproxy.record.turn import OF_PROMPT, IndexedTurn, IndexEntry, TellingTurn, Turn

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_FRAME = b"\x28"
"""First byte of a Zstandard frame: RFC 8878, section 3.1.1."""
_COMPRESSED_FROM = 4096
"""Bytes from which a turn is compressed. Below, the time for it saves hardly a page."""
_ON_THREAD_BYTES = 65_536
"""Bytes from which a thread compresses. Fewer take less than 0.15 ms; handing them over takes up to 0.1."""
_LEVEL = 1
"""Text and ids take 30 % of their bytes, in 0.6 ms for 256 KB. Level 3 takes 28 %, and 0.8 ms."""
_TURN = msgspec.msgpack.Decoder(TellingTurn)


async def pack_turns(turns: Sequence[IndexedTurn]) -> list[bytes]:
    """Each as MessagePack. Long ones are compressed; Python's lock is free in that thread."""
    encoded = [msgspec.msgpack.encode(turn) for turn, _ in turns]
    if sum(map(len, encoded)) < _ON_THREAD_BYTES:
        return _compress(encoded)
    return await asyncio.to_thread(_compress, encoded)


def unpack_turns(packed: Iterable[tuple[bytes, bytes]], unreadable: Unreadable) -> dict[str, Turn]:
    """The inverse of `pack_turns`, by id; without those that cannot be read.

    Args:
        packed: the id of each turn, and the turn.
    """
    turns: dict[str, Turn] = {}
    for key, each in packed:
        name = text(key)
        if (turn := unreadable.read(f"turn {name}", _unpack_turn, name, each)) is not None:
            turns[name] = turn
    return turns


def _unpack_turn(name: str, packed: bytes) -> Turn:
    turn = _TURN.decode(_decompress(packed) if packed[:1] == _FRAME else packed)
    if turn.id != name:
        raise ValueError(f"it holds the turn {turn.id!r}")
    arrays = (turn.appended, turn.completion, turn.logprobs)
    if any(len(each) % 4 for each in arrays) or not all(
        fact.is_whole(getattr(turn, fact.name)) for fact in RECORDED
    ):
        raise ValueError("its ids or log-probabilities are cut off")
    return turn


def text(stored: bytes) -> str:
    """A name of the store. What is damaged becomes a name that nothing else has."""
    return stored.decode("utf-8", "replace")


def _decompress(packed: bytes) -> bytes:
    try:
        return zstd.decompress(packed)
    except zstd.ZstdError as error:
        raise msgspec.DecodeError(f"what was compressed is damaged: {error}") from error


def _compress(encoded: Sequence[bytes]) -> list[bytes]:
    return [zstd.compress(each, _LEVEL) if len(each) >= _COMPRESSED_FROM else each for each in encoded]


async def pack_value(value: bytes | None) -> bytes:
    """A value of `Store.put` after one byte: `z` if it is compressed, because it is long, else `=`. None is
    empty."""
    if value is None:
        return b""
    if len(value) < _COMPRESSED_FROM:
        return b"=" + value
    if len(value) < _ON_THREAD_BYTES:
        return b"z" + zstd.compress(value, _LEVEL)
    return b"z" + await asyncio.to_thread(zstd.compress, value, _LEVEL)


def unpack_values(
    packed: Iterable[tuple[bytes, bytes]], space: str, unreadable: Unreadable, *, complete: bool = False
) -> dict[str, bytes]:
    """The inverse of `pack_value`, by name; without those that cannot be read.

    Raises:
        RecordDamaged: one cannot be read, and `complete` is set.
    """
    values: dict[str, bytes] = {}
    for key, each in packed:
        name = f"{space} {text(key)}"
        if (value := unreadable.read(name, _unpack_value, each)) is not None:
            values[text(key)] = value
        elif complete:
            raise RecordDamaged(f"the store holds a damaged value: {name}")
    return values


def is_damaged(packed: bytes) -> bool:
    """Whether a value cannot be unpacked."""
    try:
        _unpack_value(packed)
    except DAMAGED:
        return True
    return False


def _unpack_value(packed: bytes) -> bytes:
    return packed[1:] if packed[:1] == b"=" else _decompress(packed[1:])


def pack_parts(parts: Iterable[bytes]) -> bytes:
    r"""Byte strings of at most 255 bytes, each after one byte that holds its length.

    Simple enough to be read in Lua. Example: (b"ab", b"") becomes b"\x02ab\x00".
    """
    return b"".join([b"%c%s" % (len(part), part) for part in parts])


def pack_entries(entries: Iterable[IndexEntry]) -> bytes:
    """The index entries of one turn, each once: key, ids, key, ids, ... as `pack_parts`."""
    return pack_parts(chain.from_iterable(dict.fromkeys(entries)))


def unpack_entries(packed: bytes) -> list[IndexEntry]:
    """The inverse of `pack_entries`."""
    parts, start = [], 0
    while start < len(packed):
        end = start + 1 + packed[start]
        parts.append(packed[start + 1 : end])
        start = end
    return list(map(IndexEntry, parts[::2], parts[1::2]))


def complete_path(turn_id: str, turns: Mapping[str, Turn], limit: int) -> list[Turn]:
    """The last turns of the path to a turn, the first turn first, with the prompts of all of them.

    Args:
        turns: by id, the turns of the path and those that hold prompts for them.

    Returns:
        an empty list if one of them is missing or the turns form a circle.
    """
    path: list[Turn] = []
    current: str | None = turn_id
    while current is not None and len(path) < limit:
        turn = turns.get(current)
        if turn is None or len(path) == len(turns):
            return []
        path.append(turn)
        current = turn.parent
    return [] if missing_holders(path, turns) else fill_prompts(path[::-1], turns)


def missing_holders(turns: Iterable[Turn], present: Container[str]) -> list[str]:
    """Ids of the turns that hold the prompts of others and are not among those present."""
    return [turn.prompt_turn for turn in turns if turn.prompt_turn and turn.prompt_turn not in present]


def fill_prompts(turns: Iterable[Turn], holders: Mapping[str, Turn]) -> list[Turn]:
    """Turns, each with what its `prompt_turn` holds for it. Where that is missing, a turn stays as it is."""
    filled = []
    for turn in turns:
        holder = holders.get(turn.prompt_turn or "")
        fields = {name: getattr(holder, name) for name in OF_PROMPT} if holder else {}
        filled.append(replace(turn, **fields) if fields else turn)
    return filled
