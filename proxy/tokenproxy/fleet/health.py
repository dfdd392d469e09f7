"""The timer of a fleet. It finds replicas that accept requests and never respond, although `/health` does.

A replica is silent if completions run
on it and it has sent nothing for much longer than any replica needed recently. If the engine's own count of
tokens stands still too, and it is not paused, the replica is ejected. The threshold is measured, because
prompts take engines on a CPU a minute.
"""

import asyncio
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from tokenproxy.base.errors import ApiError, OutOfSockets
from tokenproxy.base.http import Request
from tokenproxy.base.tasks import end_tasks, repeat
from tokenproxy.engine.protocol import fetch
from tokenproxy.engine.token_in import CHAT_PATH, json_request
from tokenproxy.fleet.admin_calls import ask

if TYPE_CHECKING:
    from tokenproxy.fleet.fleet import Fleet
    from tokenproxy.fleet.replica import Replica

TICK_S = 0.25
_PAUSED_TICK_S = 0.05
"""Seconds between two reads of the weights while the fleet is paused. Each read notes the positions of the
streams, which must be current when the replicas resume."""
SILENT_S = 10.0
"""The shortest silence that counts."""
_TIMES_SLOWER = 3.0
"""How many times longer than usual silences a silence must be to count."""
_COUNTED_S = 2.5
"""Seconds between two looks at a count of tokens."""
LATE_S = 1.0
"""A task that wakes up later than this makes recent timeouts inconclusive."""
_LATE_REMEMBERED_S = 10.0
_NAP_S = 0.05
_NAPS = 4
_SETTLES_S = 3.0
_TOKEN_COUNTS = re.compile(
    rb"^vllm:(?:generation|prompt|iteration)_tokens_total\S*\s+([\d.e+]+)$", re.MULTILINE
)


class FleetWatch:
    """Looks at the replicas and weights of a fleet every `TICK_S`.

    It knows whether this process is on time: if it is not, a timeout proves nothing.
    """

    def __init__(self, fleet: "Fleet") -> None:
        self._fleet = fleet
        self._clock = fleet.clock
        self._task: asyncio.Task[None] | None = None
        self._examinations: dict[str, asyncio.Task[None]] = {}
        """Of silent replicas, by their names."""
        self._due = math.inf
        """When the task wakes up."""
        self._late_at = -math.inf
        """When it woke up too late."""
        self.report_late: Callable[[float], None] = lambda late_s: None
        """Is called with the seconds by which each tick came too late."""

    def start(self) -> None:
        """Start watching. Call it inside a running event loop."""
        self._task = asyncio.create_task(repeat(self._watch, "watching the fleet failed"))

    async def stop(self) -> None:
        """Stop watching."""
        await end_tasks(self._task, *self._examinations.values(), *self._fleet.weights.learning)

    @property
    def was_late(self) -> bool:
        """Whether the event loop is too busy now, or was recently, to notice responses in time."""
        now = self._clock()
        return now - self._late_at < _LATE_REMEMBERED_S or now - self._due > LATE_S

    async def settled(self) -> bool:
        """Wait, if this process was late, until it is on time for some naps in a row; False if it stays late.

        What had arrived at the sockets before has been read then.
        """
        on_time, end = _NAPS if not self.was_late else 0, self._clock() + _SETTLES_S
        while on_time < _NAPS:
            start = self._clock()
            if start > end:
                return False
            await asyncio.sleep(_NAP_S)
            on_time = on_time + 1 if self._clock() - start < 2 * _NAP_S else 0
        return True

    async def _watch(self) -> None:
        fleet = self._fleet
        often = fleet.weights.state.paused and fleet.weights.shared
        tick_s = _PAUSED_TICK_S if often else TICK_S
        self._due = self._clock() + tick_s
        await asyncio.sleep(tick_s)
        now = self._clock()
        late_s = now - self._due
        if late_s > LATE_S:
            self._late_at = now
        self._due = math.inf
        self.report_late(max(0.0, late_s))
        fleet.queue.wake()  # a replica may have come back
        watched = [*fleet.replicas, *fleet.leaving]
        for replica in watched:
            replica.report_state()
        for replica in [each for each in watched if each.load.silent_s() > SILENT_S]:
            usual_s = max(each.load.usual_silence_s() for each in watched)
            silent = replica.load.silent_s() > _TIMES_SLOWER * usual_s
            if silent and replica.name not in self._examinations and self._may_eject(replica):
                self._examinations[replica.name] = asyncio.create_task(self._examine(replica))
        for replica in [each for each in fleet.leaving if not each.load.requests]:
            await fleet.forget(replica)
        await fleet.weights.tick()

    def _may_eject(self, replica: "Replica") -> bool:
        fleet = self._fleet
        paused = fleet.weights.suspension.active  # a paused engine sends nothing
        if paused or self.was_late or not replica.ready or replica.breaker.opens_for_s():
            return False
        return fleet.has_alternative(replica)

    async def _examine(self, replica: "Replica") -> None:
        """Eject a silent replica, unless it works or is paused.

        A long completion that is not streamed is silent too, but its engine counts its tokens. Without that
        count, an engine works that answers a request for one token.
        """
        try:
            before, silent_s = await _token_count(replica), replica.load.silent_s()
            await asyncio.sleep(_COUNTED_S)
            if before != await _token_count(replica) or (before is None and await _answers(replica)):
                replica.load.shift(0.0)  # the next examination comes after another such silence
            elif (
                replica.load.silent_s() > silent_s
                and self._may_eject(replica)
                and not await self._fleet.weights.explains_silence(replica)
            ):
                self._fleet.eject(replica, "it responds to /health, but requests on it do not go on")
        finally:
            del self._examinations[replica.name]


async def _answers(replica: "Replica") -> bool:
    """Whether an engine answers a request for one token, or it is this process that cannot ask."""
    request = {"messages": [{"role": "user", "content": "."}], "max_tokens": 1}
    try:
        async with asyncio.timeout(_COUNTED_S):
            await fetch(replica.questions, json_request(CHAT_PATH, request))
    except (ApiError, TimeoutError) as error:
        return isinstance(error, OutOfSockets)
    return True


async def _token_count(replica: "Replica") -> float | None:
    """Number of tokens that the engine processed, from its own metrics; None if it has no such metric."""
    answer = await ask(replica.questions, replica, Request("GET", "/metrics"), 1.0)
    counts = _TOKEN_COUNTS.findall(answer.body) if answer.status == 200 else []
    return sum(map(float, counts)) if counts else None
