"""Finds replicas that accept requests and never respond to them, although their `/health` succeeds.

A replica is silent if requests run on it and it has sent nothing for longer than it needed recently. It is
then sent a request for one token. If that does not arrive, and the engine's own count of tokens does not
grow, the replica is ejected. The threshold is measured, because prompts take engines on a CPU a minute.
"""

import asyncio
import logging
import re
from typing import TYPE_CHECKING

from proxy.engine.protocol import fetch
from proxy.engine.token_in import CHAT_PATH, json_request
from proxy.errors import ApiError, OutOfSockets
from proxy.fleet.replica import Replica
from proxy.http import Request

if TYPE_CHECKING:
    from proxy.fleet.fleet import Fleet

log = logging.getLogger("tokenproxy")

INTERVAL_S = 0.5
SILENT_S = 3.0
"""The shortest silence that counts."""
_TIMES_SLOWER = 3.0
"""How many times longer than recent silences a silence must be to count."""
_BATCH_S = 10.0
"""Longest time for prompts that are read together, as far as one of them alone does not take longer."""
PROBE_S = 2.5
_TOKEN_COUNTS = re.compile(rb"^vllm:(?:generation|prompt|iteration)_tokens_total\S*\s+(\S+)$", re.MULTILINE)


class SilenceWatch:
    """Watches the replicas of a fleet."""

    def __init__(self, fleet: "Fleet") -> None:
        self._fleet = fleet
        self._task: asyncio.Task[None] | None = None
        self._probes: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Start watching. Call it inside a running event loop."""
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stop watching."""
        tasks = [task for task in (self._task, *self._probes.values()) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            self._fleet.queue.wake()  # a replica may have come back
            for replica in [*self._fleet.replicas, *self._fleet.leaving]:
                replica.report_state()
                if replica.name in self._probes or not self._may_probe(replica):
                    continue
                suspicious = self._is_suspicious(replica)
                if suspicious or _has_long_trial(replica):
                    self._probes[replica.name] = asyncio.create_task(self._probe(replica, suspicious))

    def _may_probe(self, replica: Replica) -> bool:
        if replica.load.silent_s() < SILENT_S or not replica.ready or replica.breaker.ejected:
            return False
        if self._fleet.weights.hold.active:
            return False  # a paused engine sends nothing
        return self._fleet.has_alternative(replica) and not self._fleet.lateness.was_late

    def _is_suspicious(self, replica: Replica) -> bool:
        """Whether it is silent for longer than it needs for its requests."""
        load = replica.load
        longest, together = load.unread_prompts()
        seconds_per_id = load.seconds_per_id()
        # an engine may read all prompts in one batch; that many of them are there does not excuse it for long
        prompt_s = max(longest * seconds_per_id, min(together * seconds_per_id, _BATCH_S))
        return load.silent_s() > _TIMES_SLOWER * max(load.slowest_gap_s, prompt_s)

    async def _probe(self, replica: Replica, suspicious: bool) -> None:
        try:
            await self._ask_for_a_token(replica, suspicious)
        finally:
            del self._probes[replica.name]

    async def _ask_for_a_token(self, replica: Replica, suspicious: bool) -> None:
        """Ask for one token; without an answer a suspicious replica is ejected."""
        before = await _token_count(replica)
        request = {"messages": [{"role": "user", "content": "."}], "max_tokens": 1}
        silent_since = replica.load.silent_s()
        try:
            async with asyncio.timeout(PROBE_S):
                status, _ = await fetch(replica.questions, json_request(CHAT_PATH, request))
        except TimeoutError:
            pass
        except OutOfSockets:
            return  # this process is at fault, not the replica
        except ApiError as error:
            if suspicious:
                self._fleet.failed(replica, error)
            return
        else:
            if status < 500:
                replica.load.progress()
                if status == 200 and _has_long_trial(replica):
                    replica.breaker.succeeded()
                return
        progressed = replica.load.silent_s() < silent_since
        after = await _token_count(replica)
        if not suspicious or progressed or before != after or self._fleet.lateness.was_late:
            return
        if await self._fleet.weights.explains_silence(replica):
            return
        if self._fleet.has_alternative(replica):
            self._fleet.eject(replica, "it responds to /health, but to no requests")


def _has_long_trial(replica: Replica) -> bool:
    """Whether its trial runs for so long that a request for one token decides instead.

    A trial of a whole completion may take minutes, and all other requests wait for its end. A shorter one
    proves more.
    """
    return replica.breaker.trial_s() > SILENT_S


async def _token_count(replica: Replica) -> float | None:
    """Number of tokens that the engine processed, from its own metrics; None if it has no such metric."""
    try:
        async with asyncio.timeout(1.0):
            status, page = await fetch(replica.questions, Request("GET", "/metrics"))
    except (ApiError, TimeoutError):
        return None
    counts = _TOKEN_COUNTS.findall(page) if status == 200 else []
    try:
        return sum(map(float, counts)) if counts else None
    except ValueError:
        return None
