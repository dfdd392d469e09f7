"""A store of the methods that an export needs, until all stores follow `proxy.history.store.Store`.

MemoryStore(Limits()) replaces it: nothing here is special to these tests.
"""

import time
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from proxy.history.store import Cursor, Evicted, IndexEntry, Session
from proxy.history.turn import Turn


class RolloutStore:
    """Plain dictionaries; finds nothing, evicts nothing."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._turns: dict[str, dict[str, Turn]] = {}
        self._rewards: dict[str, dict[str, float]] = {}

    async def add(
        self, session: Session, turns: Sequence[Turn], entries: Sequence[Sequence[IndexEntry]]
    ) -> Evicted:
        held = self._sessions.setdefault(session.id, session)
        self._turns.setdefault(session.id, {}).update((turn.id, turn) for turn in turns)
        self._sessions[session.id] = replace(held, used=time.time(), turns=len(self._turns[session.id]))
        return Evicted()

    async def turns(self, rollout: str) -> list[Turn]:
        turns = self._turns.get(rollout, {})
        filled = []
        for turn in sorted(turns.values(), key=lambda turn: turn.id):
            first = turns.get(turn.prompt_turn or "", turn)
            filled.append(replace(turn, messages=first.messages, appended=first.appended))
        return filled

    async def save_session(self, session: Session) -> Evicted:
        self._sessions[session.id] = session
        return Evicted()

    async def session(self, rollout: str) -> Session | None:
        return self._sessions.get(rollout)

    async def sessions(
        self, *, limit: int, tenant: str | None = None, before: Cursor | None = None
    ) -> list[Session]:
        listed = [
            session
            for session in self._sessions.values()
            if tenant in (None, session.tenant) and (before is None or (session.used, session.id) < before)
        ]
        return sorted(listed, key=lambda session: (session.used, session.id), reverse=True)[:limit]

    async def delete(self, rollout: str) -> bool:
        self._turns.pop(rollout, None)
        self._rewards.pop(rollout, None)
        return self._sessions.pop(rollout, None) is not None

    async def set_rewards(self, rollout: str, rewards: Mapping[str, float]) -> bool:
        if rollout in self._sessions:
            self._rewards.setdefault(rollout, {}).update(rewards)
        return rollout in self._sessions

    async def rewards(self, rollout: str) -> dict[str, float]:
        return dict(self._rewards.get(rollout, {}))
