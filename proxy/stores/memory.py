"""A store in this process: for one proxy, for tests, and for those who want nothing on disk."""

import heapq
import time
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from proxy.history.store import FOUND_AT_MOST, Evicted, Limits, Session, StoredResponse, Usage
from proxy.history.turn import Turn
from proxy.stores.packed import (
    goal,
    implicit_session,
    in_path_order,
    pack_keys,
    pack_response,
    pack_turn,
    together,
)


@dataclass(slots=True)
class _Rollout:
    session: Session
    turns: list[str] = field(default_factory=list)
    """Sorted."""
    rewards: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Kept:
    answer: StoredResponse
    since: float
    size: int


class MemoryStore:
    """Plain dictionaries. Nothing is awaited inside a call, so none sees another's half."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._rollouts: dict[str, _Rollout] = {}
        self._turns: dict[str, tuple[Turn, tuple[bytes, ...]]] = {}
        self._index: dict[bytes, list[str]] = {}
        self._size = 0
        self._evicted: dict[bytes, None] = {}
        self._answers: dict[str, _Kept] = {}
        self._answers_of: dict[bytes, list[str]] = {}
        self._answer_bytes = 0

    async def open(self) -> None:
        """See `Store.open`."""

    async def aclose(self) -> None:
        """See `Store.aclose`."""

    async def add(self, turns: Sequence[Turn], keys: Sequence[Sequence[bytes]]) -> Evicted:
        """See `Store.add`."""
        added, size = 0, 0
        for turn, of_turn in zip(turns, keys, strict=True):
            if turn.id in self._turns:
                continue
            rollout = self._rollout(turn.rollout)
            unique = tuple(dict.fromkeys(of_turn))
            self._turns[turn.id] = turn, unique
            insort(rollout.turns, turn.id)
            for key in unique:
                insort(self._index.setdefault(key, []), turn.id)
            added += 1
            size += len(pack_turn(turn)) + len(pack_keys(unique))
        if not added:
            return Evicted()
        rollout = self._rollout(turns[0].rollout)
        session = rollout.session
        rollout.session = replace(
            session,
            used=max(session.used, time.time()),
            turns=session.turns + added,
            size=session.size + size,
        )
        self._size += size
        return self._shrink(keep=session.id)

    async def find(self, keys: Sequence[bytes]) -> dict[bytes, list[str]]:
        """See `Store.find`."""
        return {key: self._index[key][: -FOUND_AT_MOST - 1 : -1] for key in keys if key in self._index}

    async def evicted(self, keys: Sequence[bytes]) -> set[bytes]:
        """See `Store.evicted`."""
        return {key for key in keys if key in self._evicted}

    async def path(self, turn_id: str) -> list[Turn]:
        """See `Store.path`."""
        found: dict[str, Turn] = {}
        following: str | None = turn_id
        while following in self._turns and following not in found:
            found[following] = turn = self._turns[following][0]
            following = turn.parent
        return in_path_order(turn_id, found)

    async def turns(self, rollout: str) -> list[Turn]:
        """See `Store.turns`."""
        known = self._rollouts.get(rollout)
        return [self._turns[turn_id][0] for turn_id in known.turns] if known else []

    async def save_session(self, session: Session) -> None:
        """See `Store.save_session`."""
        known = self._rollouts.get(session.id)
        if known is None:
            self._rollouts[session.id] = _Rollout(replace(session, turns=0, size=0))
        else:
            known.session = replace(session, turns=known.session.turns, size=known.session.size)

    async def session(self, rollout: str) -> Session | None:
        """See `Store.session`."""
        known = self._rollouts.get(rollout)
        return known.session if known else None

    async def sessions(self, *, limit: int, before: float | None = None) -> list[Session]:
        """See `Store.sessions`."""
        sessions = (rollout.session for rollout in self._rollouts.values())
        earlier = (session for session in sessions if before is None or session.used < before)
        return heapq.nlargest(limit, earlier, key=lambda session: (session.used, session.id))

    async def delete(self, rollout: str) -> bool:
        """See `Store.delete`."""
        if rollout not in self._rollouts:
            return False
        self._remove([rollout])
        return True

    async def set_rewards(self, rollout: str, rewards: Mapping[str, float]) -> None:
        """See `Store.set_rewards`."""
        self._rollout(rollout).rewards.update(rewards)

    async def rewards(self, rollout: str) -> dict[str, float]:
        """See `Store.rewards`."""
        known = self._rollouts.get(rollout)
        return dict(known.rewards) if known else {}

    async def keep_response(self, answer: StoredResponse) -> None:
        """See `Store.keep_response`."""
        if answer.id in self._answers:
            return
        kept = _Kept(answer, time.time(), len(pack_response(answer)))
        self._answers[answer.id] = kept
        insort(self._answers_of.setdefault(answer.key, []), answer.id)
        self._answer_bytes += kept.size
        while self._answer_bytes > self._limits.answer_bytes:
            self._drop_answer(next(iter(self._answers)))

    async def answers(self, key: bytes) -> list[StoredResponse]:
        """See `Store.answers`."""
        oldest = time.time() - self._limits.answer_age_s
        kept = [self._answers[answer_id] for answer_id in reversed(self._answers_of.get(key, []))]
        return [each.answer for each in kept if each.since >= oldest]

    async def take_response(self, answer: StoredResponse) -> bool:
        """See `Store.take_response`."""
        if answer.id not in self._answers:
            return False
        self._drop_answer(answer.id)
        return True

    async def evict(self) -> Evicted:
        """See `Store.evict`."""
        now = time.time()
        while self._answers:
            answer_id, kept = next(iter(self._answers.items()))
            if kept.since >= now - self._limits.answer_age_s:
                break
            self._drop_answer(answer_id)
        oldest = now - self._limits.max_age_s
        sessions = [rollout.session for rollout in self._rollouts.values()]
        old = self._bury([session.id for session in sessions if session.used < oldest])
        return together(old, self._shrink(keep=None))

    async def usage(self) -> Usage:
        """See `Store.usage`."""
        return Usage(len(self._rollouts), len(self._turns), self._size)

    def _rollout(self, rollout: str) -> _Rollout:
        known = self._rollouts.get(rollout)
        if known is None:
            known = self._rollouts[rollout] = _Rollout(implicit_session(rollout, time.time()))
        return known

    def _shrink(self, keep: str | None) -> Evicted:
        """Bury the oldest used if too much is held; `keep` last, and only if the rest is not enough."""
        if self._size <= self._limits.max_bytes:
            return Evicted()
        left, chosen = self._size, []
        held = [rollout.session for rollout in self._rollouts.values() if rollout.turns]
        for session in sorted(held, key=lambda session: session.used):
            if left <= goal(self._limits):
                break
            if session.id != keep:
                chosen.append(session.id)
                left -= session.size
        if keep is not None and left > self._limits.max_bytes:
            chosen.append(keep)
        return self._bury(chosen)

    def _bury(self, rollouts: Sequence[str]) -> Evicted:
        turns, size = len(self._turns), self._size
        for key in self._remove(rollouts):
            self._evicted.pop(key, None)
            self._evicted[key] = None
        while len(self._evicted) > self._limits.evicted_keys:
            del self._evicted[next(iter(self._evicted))]
        return Evicted(len(rollouts), turns - len(self._turns), size - self._size)

    def _remove(self, rollouts: Iterable[str]) -> list[bytes]:
        """Let rollouts go; returns the keys of their turns."""
        removed: list[bytes] = []
        for name in rollouts:
            rollout = self._rollouts.pop(name)
            self._size -= rollout.session.size
            for turn_id in rollout.turns:
                _, keys = self._turns.pop(turn_id)
                removed.extend(keys)
                for key in keys:
                    _drop(self._index, key, turn_id)
        return removed

    def _drop_answer(self, answer_id: str) -> None:
        kept = self._answers.pop(answer_id)
        self._answer_bytes -= kept.size
        _drop(self._answers_of, kept.answer.key, answer_id)


def _drop(index: dict[bytes, list[str]], key: bytes, name: str) -> None:
    names = index[key]
    del names[bisect_left(names, name)]
    if not names:
        del index[key]
