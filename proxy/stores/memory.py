"""A store in this process: for one proxy, for tests, and for those who want nothing on disk."""

import secrets
import time
from bisect import bisect_left, insort
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from proxy.history.store import (
    SECRET_BYTES,
    Cursor,
    Evicted,
    Found,
    IndexEntry,
    Limits,
    Session,
    StoredResponse,
    Usage,
)
from proxy.history.turn import Turn
from proxy.history.vocabulary import Reason
from proxy.stores.eviction import STEP, AgeClock, ClockRecord, eviction_target
from proxy.stores.memory_documents import MemoryDocuments
from proxy.stores.memory_feed import MemoryFeed
from proxy.stores.memory_index import MemoryIndex
from proxy.stores.packed import (
    complete_path,
    description_size,
    fill_prompts,
    missing_holders,
    pack_entries,
    pack_response,
    turn_size,
)


@dataclass(slots=True)
class _TurnRecord:
    turn: Turn
    entries: tuple[IndexEntry, ...]
    open: bool = True
    continued: bool = False
    """Whether a turn was recorded that continues this one."""


@dataclass(slots=True)
class _RolloutRecord:
    session: Session
    turns: list[str] = field(default_factory=list)
    """Sorted."""
    rewards: dict[str, float] = field(default_factory=dict)
    pinned_until: float = 0.0


@dataclass(frozen=True, slots=True)
class _ResponseRecord:
    response: StoredResponse
    kept: float
    size: int


class MemoryStore:
    """Plain dictionaries. Calls never await, so none sees another half-finished."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._clock = AgeClock(limits.max_age_s)
        self._clock_record: ClockRecord | None = None
        self._rollouts: dict[str, _RolloutRecord] = {}
        self._by_use: defaultdict[str | None, list[Cursor]] = defaultdict(list)
        """The sessions of each tenant, and of all under None, sorted."""
        self._turns: dict[str, _TurnRecord] = {}
        self._index = MemoryIndex()
        self.feed = MemoryFeed(self._session_of, lambda: self._by_use.get(None, []))
        self.documents = MemoryDocuments(limits)
        self._size = 0
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._responses: OrderedDict[str, _ResponseRecord] = OrderedDict()
        self._responses_by_key: dict[bytes, list[str]] = {}
        self._response_bytes = 0
        self._replica_changes: defaultdict[str, dict[str, str]] = defaultdict(dict)
        """By fleet, then by URL."""
        self._secret = secrets.token_bytes(SECRET_BYTES)

    async def open(self) -> None:
        """See `Store.open`."""
        self._clock.was_set(time.time())

    async def aclose(self) -> None:
        """See `Store.aclose`."""

    async def add(
        self, session: Session, turns: Sequence[Turn], entries: Sequence[Sequence[IndexEntry]]
    ) -> Evicted:
        """See `Store.add`."""
        new = [
            _TurnRecord(turn, tuple(dict.fromkeys(turn_entries)))
            for turn, turn_entries in zip(turns, entries, strict=True)
            if turn.id not in self._turns
        ]
        if not new:
            return Evicted()
        if session.id not in self._rollouts:
            self._create(session)
        rollout = self._rollouts[session.id]
        size = 0
        for record in new:
            if record.turn.id in self._turns:
                continue
            self._turns[record.turn.id] = record
            insort(rollout.turns, record.turn.id)
            self._flag_ambiguous(record, session.id)
            self._index.put(record.turn.id, record.entries)
            size += turn_size(record.turn) + len(pack_entries(record.entries))
        for record in new:
            if parent := self._turns.get(record.turn.parent or ""):
                self._set_open(parent, False)
                parent.continued = True
        self._size += size
        stored = rollout.session
        self._update(
            rollout,
            replace(
                stored,
                used=self._use(stored),
                turns=len(rollout.turns),
                size=stored.size + size,
            ),
        )
        return self._keep_limits(session.id)

    async def find(self, keys: Sequence[bytes], rollout: str | None = None) -> dict[bytes, Found]:
        """See `Store.find`."""
        results = {key: self._index.find(key, self._rollout_of) for key in keys}
        return {key: found for key, found in results.items() if found is not None}

    async def evicted(self, keys: Sequence[bytes]) -> set[bytes]:
        """See `Store.evicted`."""
        return {key for key in keys if key in self._evicted}

    async def claim(self, turn: str) -> bool:
        """See `Store.claim`."""
        record = self._turns.get(turn)
        if record is None or not record.open:
            return False
        self._set_open(record, False)
        return True

    async def release(self, turn: str) -> None:
        """See `Store.release`."""
        record = self._turns.get(turn)
        if record is not None and not record.continued:
            self._set_open(record, True)

    async def pin(self, rollout: str, until: float) -> None:
        """See `Store.pin`."""
        record = self._rollouts.get(rollout)
        if record is not None:
            record.pinned_until = max(record.pinned_until, until)
            self._update(record, replace(record.session, used=self._use(record.session)))

    async def path(self, turn: str) -> list[Turn]:
        """See `Store.path`."""
        turns: dict[str, Turn] = {}
        current: str | None = turn
        while current is not None and current not in turns and (record := self._turns.get(current)):
            turns[current] = record.turn
            current = record.turn.parent
        for name in missing_holders(turns.values(), turns):
            if holder := self._turns.get(name):
                turns[name] = holder.turn
        return complete_path(turn, turns)

    async def turns(self, rollout: str) -> list[Turn]:
        """See `Store.turns`."""
        record = self._rollouts.get(rollout)
        turns = {turn: self._turns[turn].turn for turn in record.turns} if record else {}
        return fill_prompts(turns.values(), turns)

    async def newest(self, rollout: str, limit: int) -> list[str]:
        """See `Store.newest`."""
        record = self._rollouts.get(rollout)
        return record.turns[: -limit - 1 : -1] if record else []

    async def save_session(self, session: Session) -> Evicted:
        """See `Store.save_session`."""
        record = self._rollouts.get(session.id)
        if record is None:
            self._create(session)
        else:
            stored = record.session
            growth = description_size(session) - description_size(stored)
            self._size += growth
            self._update(
                record,
                replace(session, ambiguous=stored.ambiguous, turns=stored.turns, size=stored.size + growth),
            )
        return self._keep_limits(session.id)

    async def session(self, rollout: str) -> Session | None:
        """See `Store.session`."""
        return self._session_of(rollout)

    async def sessions(
        self, *, limit: int, tenant: str | None = None, before: Cursor | None = None
    ) -> list[Session]:
        """See `Store.sessions`."""
        by_use = self._by_use.get(tenant, [])
        end = len(by_use) if before is None else bisect_left(by_use, before)
        return [self._rollouts[place.id].session for place in reversed(by_use[max(end - limit, 0) : end])]

    async def delete(self, rollout: str) -> bool:
        """See `Store.delete`."""
        if rollout not in self._rollouts:
            return False
        self._remove(rollout)
        return True

    async def set_rewards(self, rollout: str, rewards: Mapping[str, float]) -> bool:
        """See `Store.set_rewards`."""
        record = self._rollouts.get(rollout)
        if record is None:
            return False
        before = dict(record.rewards)
        record.rewards.update(rewards)
        self.feed.finish_rewarded(rollout, before, rewards)
        return True

    async def rewards(self, rollout: str) -> dict[str, float]:
        """See `Store.rewards`."""
        record = self._rollouts.get(rollout)
        return dict(record.rewards) if record else {}

    async def keep_response(self, response: StoredResponse) -> None:
        """See `Store.keep_response`."""
        if response.id in self._responses:
            return
        record = _ResponseRecord(response, time.time(), len(pack_response(response)))
        self._responses[response.id] = record
        insort(self._responses_by_key.setdefault(response.key, []), response.id)
        self._response_bytes += record.size
        while self._response_bytes > self._limits.response_bytes:
            self._drop_response(next(iter(self._responses)))

    async def responses(self, key: bytes) -> list[StoredResponse]:
        """See `Store.responses`."""
        oldest = time.time() - self._limits.response_age_s
        records = [self._responses[name] for name in reversed(self._responses_by_key.get(key, []))]
        return [record.response for record in records if record.kept >= oldest]

    async def take_response(self, response: StoredResponse) -> bool:
        """See `Store.take_response`."""
        if response.id not in self._responses:
            return False
        self._drop_response(response.id)
        return True

    async def replica_changes(self, fleet: str) -> dict[str, str]:
        """See `Store.replica_changes`."""
        return dict(self._replica_changes.get(fleet, {}))

    async def change_replica(self, fleet: str, url: str, change: str | None) -> None:
        """See `Store.change_replica`."""
        if change is None:
            self._replica_changes[fleet].pop(url, None)
        else:
            self._replica_changes[fleet][url] = change

    async def secret(self) -> bytes:
        """See `Store.secret`."""
        return self._secret

    async def evict(self) -> Evicted:
        """See `Store.evict`."""
        now = time.time()
        oldest_response = now - self._limits.response_age_s
        while self._responses:
            name, record = next(iter(self._responses.items()))
            if record.kept >= oldest_response:
                break
            self._drop_response(name)
        self.documents.drop_old()
        self._clock_record = self._clock.next_record(self._clock_record, now, self._clock.was_set(now))
        oldest = self._clock.oldest(now, self._clock_record.steady_since)
        self.feed.forget_consumers(oldest)
        return self._keep_limits(None, oldest)

    async def usage(self) -> Usage:
        """See `Store.usage`."""
        return Usage(len(self._rollouts), len(self._turns), self._size)

    def _rollout_of(self, turn: str) -> str:
        return self._turns[turn].turn.rollout

    def _session_of(self, rollout: str) -> Session | None:
        record = self._rollouts.get(rollout)
        return record.session if record else None

    def _create(self, session: Session) -> None:
        size = description_size(session)
        created = replace(session, ambiguous=False, turns=0, size=size)
        self._rollouts[session.id] = _RolloutRecord(created)
        for tenant in (None, session.tenant):
            insort(self._by_use[tenant], Cursor(session.used, session.id))
        self._size += size

    def _update(self, record: _RolloutRecord, session: Session) -> None:
        """Replace the session of a rollout; the lists by use follow."""
        self._remove_use(record.session)
        record.session = session
        for tenant in (None, session.tenant):
            insort(self._by_use[tenant], Cursor(session.used, session.id))

    def _use(self, session: Session) -> float:
        """The time of a use now: later than that of all other sessions, even if the clock was set back."""
        last, now = self._by_use[None][-1], time.time()
        if last.id == session.id:
            return max(session.used, now)
        return max(now, last.used + 1e-6)

    def _remove_use(self, session: Session) -> None:
        place = Cursor(session.used, session.id)
        for tenant in (None, session.tenant):
            by_use = self._by_use[tenant]
            del by_use[bisect_left(by_use, place)]
            if not by_use:
                del self._by_use[tenant]

    def _set_open(self, record: _TurnRecord, open: bool) -> None:
        if record.open != open:
            record.open = open
            self._index.set_open(record.turn.id, record.entries, open)

    def _flag_ambiguous(self, record: _TurnRecord, rollout: str) -> None:
        """Make sessions ambiguous because of a turn that is about to be added."""
        keys = {entry.key for entry in record.entries if entry.ids}
        rollouts = {self._rollout_of(turn) for key in keys for turn in self._index.turns_to_flag(key)}
        if rollouts - {rollout} or record.turn.reason == Reason.AMBIGUOUS:
            for name in rollouts | {rollout}:
                session = self._rollouts[name].session
                self._rollouts[name].session = replace(session, ambiguous=True)

    def _keep_limits(self, own: str | None, oldest: float = 0.0) -> Evicted:
        """Evict rollouts last used before `oldest`, and the least recently used if too much is held.

        Args:
            own: evicted last, and only if it alone exceeds the limit.
        """
        limits, now = self._limits, time.time()
        target = eviction_target(limits) if self._size > limits.max_bytes else self._size
        chosen: list[str] = []
        turns, left = 0, self._size
        for place in self._by_use.get(None, []):
            enough = left <= target or (turns >= STEP and left <= limits.max_bytes)
            if enough and place.used >= oldest:
                break
            record = self._rollouts[place.id]
            if place.id != own and record.pinned_until <= now:
                chosen.append(place.id)
                turns += record.session.turns
                left -= record.session.size
        if own is not None:
            record = self._rollouts[own]
            if record.session.size > limits.max_bytes and record.pinned_until <= now:
                chosen.append(own)
        return self._evict(chosen)

    def _evict(self, rollouts: Sequence[str]) -> Evicted:
        turns, size = len(self._turns), self._size
        undelivered = sum(map(self.feed.undelivered, rollouts))
        for rollout in rollouts:
            for key in self._remove(rollout):
                self._evicted[key] = None
                self._evicted.move_to_end(key)
        while len(self._evicted) > self._limits.evicted_keys:
            self._evicted.popitem(last=False)
        return Evicted(len(rollouts), turns - len(self._turns), size - self._size, undelivered)

    def _remove(self, rollout: str) -> list[bytes]:
        """Remove a rollout with its turns; returns the keys of those."""
        record = self._rollouts.pop(rollout)
        self.feed.remove(rollout)
        self._remove_use(record.session)
        self._size -= record.session.size
        keys: list[bytes] = []
        for name in record.turns:
            turn = self._turns.pop(name)
            self._index.remove(name, turn.entries, turn.open)
            keys.extend(entry.key for entry in turn.entries)
        return keys

    def _drop_response(self, name: str) -> None:
        record = self._responses.pop(name)
        self._response_bytes -= record.size
        names = self._responses_by_key[record.response.key]
        del names[bisect_left(names, name)]
        if not names:
            del self._responses_by_key[record.response.key]
