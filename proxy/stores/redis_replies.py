"""Reads what the scripts of a Redis store reply."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from proxy.history.store import Candidate, CandidateGroup, Found, Session


def read_reply(packed: bytes) -> Iterator[bytes]:
    """The values of a script's reply: b"5:hello2:ab" becomes b"hello", b"ab"."""
    start = 0
    while start < len(packed):
        colon = packed.index(b":", start)
        start = colon + 1 + int(packed[start:colon])
        yield packed[colon + 1 : start]


def read_session(rollout: bytes, parts: Iterator[bytes]) -> Session:
    """The session of a rollout from the values that `reply_session` of `redis_functions` appends."""
    used, count = float(next(parts)), int(next(parts))
    fields = list(islice(parts, count))
    return session_from(rollout.decode(), used, dict(zip(fields[::2], fields[1::2], strict=True)))


def session_from(rollout: str, used: float, fields: Mapping[bytes, bytes]) -> Session:
    """A session from the fields of its hash."""
    return Session(
        id=rollout,
        tenant=fields[b"tenant"].decode(),
        explicit=fields[b"explicit"] == b"1",
        ambiguous=b"ambiguous" in fields,
        created=float(fields[b"created"]),
        used=used,
        turns=int(fields.get(b"turns", 0)),
        size=int(fields[b"size"]),
        defaults=fields[b"defaults"],
        overrides=fields[b"overrides"],
        metadata=fields[b"metadata"],
    )


def read_found(keys: Sequence[bytes], packed: bytes) -> dict[bytes, Found]:
    """The reply of `FIND`."""
    parts = read_reply(packed)
    return {
        keys[int(number)]: Found(total, [group for _, group in groups])
        for number, total, groups in _found(parts)
    }


def read_dated_groups(packed: bytes) -> Iterator[tuple[int, int, list[tuple[str, CandidateGroup]]]]:
    """The reply of `FIND`: for each key its index and number of turns, and groups with their newest turn."""
    for number, total, groups in _found(read_reply(packed)):
        yield int(number), total, groups


def _found(parts: Iterator[bytes]) -> Iterator[tuple[bytes, int, list[tuple[str, CandidateGroup]]]]:
    for number in parts:
        total, groups = int(next(parts)), int(next(parts))
        yield number, total, [_read_group(parts) for _ in range(groups)]


def _read_group(parts: Iterator[bytes]) -> tuple[str, CandidateGroup]:
    ids, newest = next(parts), next(parts).decode()
    total, candidates = int(next(parts)), int(next(parts))
    return newest, CandidateGroup(ids, total, [_read_candidate(parts) for _ in range(candidates)])


def _read_candidate(parts: Iterator[bytes]) -> Candidate:
    return Candidate(next(parts).decode(), next(parts).decode(), next(parts) == b"1")
