"""A store that holds a request up for at most a second, also when it hangs or fails.

`GuardedCalls` decides which calls are made. Turns that the store does not take in time are recorded later;
meanwhile this process finds them next to those that the store finds. While the store cannot be read nothing
is found: only the store knows whether other turns have the same text.
"""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from typing import Any

from proxy.history.store import (
    Cursor,
    Evicted,
    Found,
    IndexEntry,
    Session,
    Store,
    StoredResponse,
    StoreError,
    StoreStalled,
    Usage,
)
from proxy.history.turn import Turn
from proxy.metrics import Metrics
from proxy.stores.guarded_calls import GuardedCalls, GuardLimits
from proxy.stores.guarded_documents import GuardedDocuments
from proxy.stores.guarded_feed import GuardedFeed
from proxy.stores.health import StoreHealth
from proxy.stores.packed import complete_path, fill_prompts, missing_holders
from proxy.stores.waiting import Waiting

log = logging.getLogger("tokenproxy")


class GuardedStore:
    """A store that may stall, fail, or be missing at first."""

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        *,
        required: bool = False,
        limits: GuardLimits = GuardLimits(),  # noqa: B008 - frozen
    ) -> None:
        """`required`: whether `open` fails if the store does not respond."""
        self._store = store
        self._metrics = metrics
        self._calls = GuardedCalls(store, metrics, required=required, limits=limits)
        self._late: set[asyncio.Task[None]] = set()
        self.feed = GuardedFeed(store.feed, self._calls, self._refuse_waiting)
        self.documents = GuardedDocuments(store.documents, self._calls)

    def health(self) -> StoreHealth:
        """How the store does now."""
        return self._calls.health()

    async def open(self) -> None:
        """See `Store.open`. A store that does not respond is tried again later, unless it is required.

        Raises:
            StoreError: it is required, or can never be used.
        """
        await self._calls.open()

    async def aclose(self) -> None:
        """See `Store.aclose`. Turns that cannot be recorded in time are lost."""
        await self._calls.aclose()

    async def add(
        self, session: Session, turns: Sequence[Turn], entries: Sequence[Sequence[IndexEntry]]
    ) -> Evicted:
        """See `Store.add`. What the store does not take in time is recorded later.

        Raises:
            RecordRefused: it cannot be recorded.
            StoreError: too much waits already.
        """
        return await self._calls.record(Waiting(session, turns, entries)) if turns else Evicted()

    async def find(self, keys: Sequence[bytes], rollout: str | None = None) -> dict[bytes, Found]:
        """See `Store.find`."""
        # before the store is read: turns that it takes meanwhile are found in both
        here = self._calls.waiting.look_up(keys)
        return self._calls.waiting.find_too(await self._calls.read(self._store.find, keys, rollout), here)

    async def evicted(self, keys: Sequence[bytes]) -> set[bytes]:
        """See `Store.evicted`."""
        return await self._calls.read(self._store.evicted, keys)

    async def claim(self, turn: str) -> bool:
        """See `Store.claim`. A turn that is claimed too late is released."""
        if self._calls.waiting.has_turn(turn):
            return False
        claims: list[asyncio.Future[bool]] = []

        def claim() -> Awaitable[bool]:
            claims.append(asyncio.ensure_future(self._store.claim(turn)))
            return asyncio.shield(claims[0])

        try:
            return await self._calls.write(claim)
        except StoreStalled:
            if claims and not claims[0].done():
                self._later(self._release_late(turn, claims[0]))
            raise

    async def release(self, turn: str) -> None:
        """See `Store.release`."""
        await self._calls.write(self._store.release, turn)

    async def pin(self, rollout: str, until: float) -> None:
        """See `Store.pin`."""
        await self._calls.write(self._store.pin, rollout, until)

    async def path(self, turn: str) -> list[Turn]:
        """See `Store.path`."""
        here = self._calls.waiting.path(turn)
        if not here:
            return await self._calls.read(self._store.path, turn)
        turns = {each.id: each for each in here}
        if here[0].parent is not None:
            before = await self._calls.read(self._store.path, here[0].parent)
            turns = {each.id: each for each in before} | turns
        for name in missing_holders(here, turns):
            # another choice of the same request; it may be recorded already
            holder = self._calls.waiting.turn(name)
            held = [holder] if holder else await self._calls.read(self._store.path, name)
            turns |= {each.id: each for each in held}
        return complete_path(turn, turns)

    async def turns(self, rollout: str) -> list[Turn]:
        """See `Store.turns`."""
        here = self._calls.waiting.of_rollout(rollout)
        stored = await self._calls.read(self._store.turns, rollout)
        if not here:
            return stored
        turns = {turn.id: turn for turn in here} | {turn.id: turn for turn in stored}
        return fill_prompts([turns[name] for name in sorted(turns)], turns)

    async def newest(self, rollout: str, limit: int) -> list[str]:
        """See `Store.newest`."""
        here = {turn.id for turn in self._calls.waiting.of_rollout(rollout)}
        stored = await self._calls.read(self._store.newest, rollout, limit)
        return sorted(here.union(stored), reverse=True)[:limit] if here else stored

    async def save_session(self, session: Session) -> Evicted:
        """See `Store.save_session`."""
        self._refuse_waiting(session.id)
        return await self._calls.write(self._store.save_session, session)

    async def session(self, rollout: str) -> Session | None:
        """See `Store.session`."""
        here = self._calls.waiting.session(rollout)
        return await self._calls.read(self._store.session, rollout) or here

    async def sessions(
        self, *, limit: int, tenant: str | None = None, before: Cursor | None = None
    ) -> list[Session]:
        """See `Store.sessions`. Those whose first turns wait are not among them."""
        return await self._calls.read(lambda: self._store.sessions(limit=limit, tenant=tenant, before=before))

    async def delete(self, rollout: str) -> bool:
        """See `Store.delete`."""
        self._refuse_waiting(rollout)
        return await self._calls.write(self._store.delete, rollout)

    async def set_rewards(self, rollout: str, rewards: Mapping[str, float]) -> bool:
        """See `Store.set_rewards`."""
        self._refuse_waiting(rollout)
        return await self._calls.write(self._store.set_rewards, rollout, rewards)

    async def rewards(self, rollout: str) -> dict[str, float]:
        """See `Store.rewards`."""
        return await self._calls.read(self._store.rewards, rollout)

    async def keep_response(self, response: StoredResponse) -> None:
        """See `Store.keep_response`."""
        await self._calls.write(self._store.keep_response, response)

    async def responses(self, key: bytes) -> list[StoredResponse]:
        """See `Store.responses`."""
        return await self._calls.read(self._store.responses, key)

    async def take_response(self, response: StoredResponse) -> bool:
        """See `Store.take_response`."""
        return await self._calls.write(self._store.take_response, response)

    async def replica_changes(self, fleet: str) -> dict[str, str]:
        """See `Store.replica_changes`."""
        return await self._calls.read(self._store.replica_changes, fleet)

    async def change_replica(self, fleet: str, url: str, change: str | None) -> None:
        """See `Store.change_replica`."""
        await self._calls.write(self._store.change_replica, fleet, url, change)

    async def secret(self) -> bytes:
        """See `Store.secret`."""
        return await self._calls.write(self._store.secret)

    async def evict(self) -> Evicted:
        """See `Store.evict`."""
        return await self._calls.write(self._store.evict)

    async def usage(self) -> Usage:
        """See `Store.usage`."""
        return await self._calls.read(self._store.usage)

    def _refuse_waiting(self, rollout: str) -> None:
        """Refuse to change what is not complete yet. Raises StoreStalled."""
        if self._calls.waiting.has_rollout(rollout):
            raise StoreStalled("turns of this session are still to be recorded: try again soon")

    async def _release_late(self, turn: str, claiming: "asyncio.Future[bool]") -> None:
        try:
            if await claiming:
                await self._store.release(turn)
        except StoreError as error:
            self._metrics.store_errors.inc()
            log.error("a turn that was claimed in vain may stay claimed: %s", error)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._late.add(task)
        task.add_done_callback(self._late.discard)
