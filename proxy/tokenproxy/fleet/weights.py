"""The state of the fleet's weights in this process: which replicas may serve, and what samples each turn.

All processes of the fleet share the state, see `weight_state.py`. While turns run, each reads it every 0.25
s, and once more before it records a turn, so that no turn is recorded with a version that another process has
replaced. An idle process reads it before the next request.
"""

import asyncio
import logging
from collections.abc import Iterable
from contextvars import Context
from typing import TYPE_CHECKING
from weakref import WeakSet

from msgspec.structs import replace

from tokenproxy.base.http import Request
from tokenproxy.fleet.admin_calls import ask
from tokenproxy.fleet.queue import Suspension
from tokenproxy.fleet.replica import Replica
from tokenproxy.fleet.weight_state import (
    Failure,
    FleetState,
    SharedError,
    SharedWords,
    WeightTag,
    read_state,
    write_state,
)

if TYPE_CHECKING:
    from tokenproxy.fleet.fleet import Fleet

log = logging.getLogger("tokenproxy")

TIMEOUT_S = 600.0
_ASK_S = 2.0
"""Seconds in which a replica must answer a question about its weights."""
_LACKS_ROUTE_S = 30.0
"""Seconds until a replica that does not report its version is asked again."""
_RESUMED_TICK_S = 0.25
"""Seconds between two questions to a replica that somebody else paused, while requests wait for it."""
_SILENT_S = 1.0
"""Seconds before a request is sent again to a paused replica that does not tell whether it is."""
_MARGIN_S = 30.0
"""An update fails if nothing happens in it for this much longer than a call may take."""


class Weights:
    """The weights of one fleet."""

    def __init__(self, fleet: "Fleet", timeout_s: float = TIMEOUT_S) -> None:
        """The state of a fleet that is not watched yet.

        Args:
            timeout_s: how long a call may take on a replica, and about how long an update may be idle.
        """
        self.state = FleetState()
        self.timeout_s = timeout_s
        self.words: SharedWords | None = None
        """Shares the state with other processes; None keeps it in this one."""
        self.calls = 0
        """Admin calls of this process that run."""
        self.ahead = False
        """Whether this process changes the state, so that what it reads in the store does not count."""
        self.ends_pause = False
        """Whether other processes were told that a pause ends, which lasts here until the engines resumed."""
        self.outdated = False
        """Whether the state must be read before a request is sent: no turn ran, so that it was not read."""
        self._fleet = fleet
        self._clock = fleet.clock
        self.suspension = Suspension(self._clock)
        self._tags: WeakSet[WeightTag] = WeakSet()
        self._words_lock = asyncio.Lock()
        self._reads_begun = self._last_read = 0
        """Number of reads of the store that began, and of the last one that ended."""
        self._readable = True
        """Whether the last read of the store succeeded."""
        self.learning: set[asyncio.Task[None]] = set()
        """Tasks that ask replicas for their versions, while requests wait."""
        self._moved_at = self._read_at = self._clock()

    # --- what requests need

    def problem(self, replica: Replica) -> str:
        """Why a replica gets no requests; empty if its weights are those of the fleet."""
        return self.state.problem(replica.name, replica.weight_version)

    def begin(self, replica: Replica, *, stream: bool) -> WeightTag:
        """The tag of a turn that is about to be sent to a replica."""
        changing = bool(self.state.updating and not self.state.paused)
        tag = WeightTag(replica.weight_version, replica.name, stream=stream, uncertain=changing)
        self._tags.add(tag)
        return tag

    async def confirm(self, tag: WeightTag) -> None:
        """Apply what other processes have changed until now; a tag is uncertain if that cannot be read."""
        if tag.version is None and self.state.version is None:
            return
        if not await self.refresh():
            tag.changing()

    # --- what admin calls need

    @property
    def shared(self) -> bool:
        """Whether other processes may have the same fleet."""
        return self.words is not None and self.words.shared

    async def change(self, state: FleetState, *, adopt: bool = True) -> None:
        """Let other processes learn of a state, and adopt it, unless that follows."""
        self.ahead, self.ends_pause = True, not adopt
        if adopt:
            self._adopt(state)
        await self._write(state)

    def named(self, replica: Replica, version: str) -> None:
        """A replica has a version from now on."""
        replica.weight_version = version
        for tag in self._tags_of(replica):
            tag.named(version, paused=bool(self.state.paused))

    def note_positions(self, *, late: bool) -> None:
        """Note how much of each stream has arrived; `late`: more may have arrived than this process has read.

        Call it right before the replicas resume.
        """
        for tag in self._tags:
            tag.before = None if late else tag.progress()

    def resumed(self, replica: Replica) -> None:
        """A replica was resumed after a pause."""
        for tag in self._tags_of(replica):
            tag.resumed(tag.before)
            if self.state.updating:
                tag.changing()

    def changing(self, replica: Replica) -> None:
        """The weights of a replica change: the turns that run on it are uncertain."""
        for tag in self._tags_of(replica):
            tag.changing()

    def ask_again(self, replicas: Iterable[Replica]) -> None:
        """Ask replicas for their versions; requests wait until they have answered."""

        async def ask_all() -> None:
            await asyncio.gather(*(self._ask(replica) for replica in replicas if replica.ready))

        def done(task: "asyncio.Task[None]") -> None:
            self.learning.discard(task)
            self._apply_suspension()

        # a context of its own: it is not part of the request that caused it
        task = asyncio.create_task(ask_all(), context=Context())
        self.learning.add(task)
        task.add_done_callback(done)

    # --- watching

    async def greet(self, replica: Replica) -> None:
        """Ask a replica for its version, before it gets requests: it may have been restarted."""
        await self.refresh()
        replica.weight_version = None
        await self._ask(replica)
        if problem := self.problem(replica):
            log.warning("%s gets no requests: %s", replica.name, problem)

    async def refresh(self) -> bool:
        """Read what other processes changed, in a read that starts after this call; False if that fails."""
        if self.words is None or not self.words.shared:
            return True
        begun = self._reads_begun
        try:
            await self.words.wait(self._words_lock.acquire())
        except SharedError:
            return False  # a read of before still waits for the store
        try:
            if self._last_read > begun:
                return self._readable  # that of another request, which began after this call
            self._reads_begun = number = self._reads_begun + 1
            old = self.state
            if old.paused and not self.calls:  # else this process ends the pause itself
                self.note_positions(late=self._fleet.watch.was_late)
            try:
                state = await read_state(self.words)
            except SharedError as error:
                if self._readable:
                    log.error("the weights that other processes set cannot be read: %s", error)
                self._readable = False
            else:
                if not self._readable:
                    log.info("the weights that other processes set can be read again")
                self._readable = True
                if self.ends_pause:
                    state = replace(state, paused=old.paused)
                if self.state is old and not self.ahead and state != old:
                    self._learn(state)
            self._last_read, self.outdated, self._read_at = number, False, self._clock()
            return self._readable
        finally:
            self._words_lock.release()

    async def explains_silence(self, replica: Replica) -> bool:
        """Whether a replica that sends nothing is paused, by a proxy of the fleet or by somebody else."""
        await self.refresh()
        if self.suspension.active or await self._is_paused(replica):
            replica.load.shift(0.0)
            return True
        return False

    async def pause_ended(self, replica: Replica, until: float) -> None:
        """Wait until a replica is not paused any more, or for a second if it does not say; at most `until`.

        It may have been paused by somebody else, so that the state of the fleet does not tell.
        """
        paused: bool | None = True
        while paused and self._clock() < until:
            await asyncio.sleep(_RESUMED_TICK_S)
            paused = await self._is_paused(replica)
        if paused is None:
            await asyncio.sleep(_SILENT_S)

    def _learn(self, new: FleetState) -> None:
        """Adopt what another process changed."""
        old = self.state
        if new.revision != old.revision and new.version is not None:
            log.info("the weights of the fleet are version %s", new.version)
            for tag in self._tags:
                paused = bool(old.paused or new.paused) and not self.ends_pause
                tag.named(new.version, paused=paused)
            self.ask_again(self._fleet.replicas)
        if old.paused and not new.paused:
            for tag in self._tags:
                positions = None if self._fleet.watch.was_late else tag.progress()
                tag.resumed(positions if positions == tag.before else None)
        self._adopt(new)

    def _adopt(self, new: FleetState) -> None:
        """Make a state the current one, and suspend or release requests by it."""
        old, self.state = self.state, new
        self._moved_at = self._clock()
        if new.updating and not new.paused and not (old.updating and not old.paused):
            for tag in self._tags:
                tag.changing()
        self._apply_suspension()

    def _apply_suspension(self) -> None:
        fleet = self._fleet
        if self.state.paused or self.state.updating or self.learning:
            self.suspension.begin()
            return
        if self.suspension.active:
            seconds = self.suspension.end()
            for replica in [*fleet.replicas, *fleet.leaving]:
                replica.load.shift(seconds)
            fleet.queue.wake()

    async def _write(self, state: FleetState) -> None:
        """Write a state to the store. Where that fails, it is written again with the next change or tick."""
        async with self._words_lock:
            try:
                if self.words is not None:
                    await write_state(self.words, state)
            except SharedError as error:
                log.error("other processes do not learn of the fleet's weights yet: %s", error)
            else:
                self.ahead = state is not self.state and not self.ends_pause

    async def tick(self) -> None:
        """Read or write the state, and end an update that is idle."""
        if self.ahead and not self.calls:
            await self._write(self.state)
        idle = not (self._tags or self.suspension.active or self._fleet.queue.waiting)
        if idle and self._clock() - self._read_at < self._fleet.watch_interval_s:
            self.outdated = self.shared
            return
        await self.refresh()
        moved_s = self._clock() - self._moved_at
        if self.state.updating and not self.calls and moved_s > self.timeout_s + _MARGIN_S:
            await self._give_up_update()

    async def check(self, replica: Replica) -> None:
        """Ask a ready replica for its version, and whether it was resumed, unless an update changes that."""
        if self.state.failures or self.state.paused:
            await self.refresh()  # a change must begin with what other processes have written
        state = self.state
        if self.calls or self.learning or state.updating:
            return
        if self._clock() >= replica.ask_version_at or state.version is not None or state.failures:
            await self._ask(replica)
        if not state.paused or self._clock() - self._moved_at < self._fleet.watch_interval_s:
            return  # a pause that has just begun may not have reached the engines yet
        resumed = await self._is_paused(replica) is False and await self._resumed_elsewhere()
        if resumed and self.state is state and not self.calls:
            log.warning("the fleet was resumed by another client of the engines")
            for tag in self._tags:
                tag.resumed(None)
            await self.change(replace(state, paused=""))

    async def _give_up_update(self) -> None:
        """End an update that is idle: a part of the weights may be loaded, so its replicas leave service."""
        path, group = self.state.updating, self.state.group
        reason = f"a weight update began with {path} and did not end: update its weights again"
        log.error("%s", reason)
        names = [each.name for each in self._fleet.replicas if not group or each.name in group]
        failures = self.state.failures | {name: Failure(path, reason) for name in names}
        await self.change(replace(self.state, failures=failures, updating=""))

    async def _resumed_elsewhere(self) -> bool:
        """Whether no ready engine is paused."""
        ready = [replica for replica in self._fleet.replicas if replica.ready]
        answers = await asyncio.gather(*map(self._is_paused, ready))
        return bool(ready) and all(paused is False for paused in answers)

    async def _ask(self, replica: Replica) -> None:
        """Ask a replica for its version, and whether it was resumed. Without an answer nothing changes."""
        failure = self.state.failures.get(replica.name)
        if failure is not None and not failure.loading and await self._is_paused(replica) is False:
            log.info("%s gets requests again: its weights are those of the fleet", replica.name)
            failures = {name: each for name, each in self.state.failures.items() if name != replica.name}
            await self.change(replace(self.state, failures=failures))
        answer = await ask(replica.questions, replica, Request("GET", "/weight_info"), _ASK_S)
        replica.ask_version_at = self._clock() + _LACKS_ROUTE_S if answer.status == 404 else 0.0
        if not answer.status or answer.status >= 500:
            return
        value = answer.value("weight_version") if answer.ok else None
        version = value if isinstance(value, str) else None
        if version == replica.weight_version:
            return
        if self.state.problem(replica.name, version):
            await self.refresh()  # another process may have set it
            if self.state.updating or self.calls:
                return
        if replica.weight_version is not None:
            log.info("the weights of %s are version %s", replica.name, version)
            self.changing(replica) if version is None else self.named(replica, version)
        replica.weight_version = version

    async def _is_paused(self, replica: Replica) -> bool | None:
        """Whether an engine is paused; None if it does not say."""
        answer = await ask(replica.questions, replica, Request("GET", "/is_paused"), _ASK_S)
        return answer.value("is_paused") is True if answer.ok else None

    def _tags_of(self, replica: Replica) -> list[WeightTag]:
        return [tag for tag in self._tags if tag.replica == replica.name]
