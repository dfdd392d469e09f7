"""How stores that hold bytes hold a turn, and what all stores count."""

from collections.abc import Iterable

import msgspec

from proxy.history.store import Evicted, Limits, Session, StoredResponse
from proxy.history.turn import Turn, made_up

_TURN = msgspec.msgpack.Decoder(Turn)
_ANSWER = msgspec.msgpack.Decoder(StoredResponse)


def pack_turn(turn: Turn) -> bytes:
    """A turn as MessagePack."""
    return msgspec.msgpack.encode(turn)


def unpack_turn(packed: bytes) -> Turn:
    """The inverse of `pack_turn`. Raises msgspec.DecodeError."""
    return _TURN.decode(packed)


def pack_response(answer: StoredResponse) -> bytes:
    """An answer as MessagePack."""
    return msgspec.msgpack.encode(answer)


def unpack_response(packed: bytes) -> StoredResponse:
    """The inverse of `pack_response`. Raises msgspec.DecodeError."""
    return _ANSWER.decode(packed)


def pack_keys(keys: Iterable[bytes]) -> bytes:
    """The keys of one turn, each once and behind a byte that is its length: even Lua can read that."""
    return b"".join(b"%c%s" % (len(key), key) for key in dict.fromkeys(keys))


def unpack_keys(packed: bytes) -> list[bytes]:
    """The inverse of `pack_keys`."""
    keys, at = [], 0
    while at < len(packed):
        end = at + 1 + packed[at]
        keys.append(packed[at + 1 : end])
        at = end
    return keys


def implicit_session(rollout: str, now: float) -> Session:
    """The session of a conversation that came without one."""
    return Session(id=rollout, explicit=not made_up(rollout), created=now, used=now)


def goal(limits: Limits) -> int:
    """Bytes that may be left once turns have to leave."""
    return limits.max_bytes * 9 // 10


def together(one: Evicted, other: Evicted) -> Evicted:
    """The sum of both."""
    return Evicted(one.rollouts + other.rollouts, one.turns + other.turns, one.size + other.size)


def in_path_order(turn_id: str, turns: dict[str, Turn]) -> list[Turn]:
    """The turns from the first to `turn_id`; empty if one of them is missing, or they run in a circle."""
    found: list[Turn] = []
    following: str | None = turn_id
    while following is not None:
        turn = turns.get(following)
        if turn is None or len(found) == len(turns):
            return []
        found.append(turn)
        following = turn.parent
    return found[::-1]
