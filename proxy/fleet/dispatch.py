"""One request on its way to a replica, and to another one where that is safe.

1. The order of the replicas is fixed when the request starts.
2. A replica that accepts no connection costs nothing: the next one gets the request.
3. After any other failure the request runs at most once more, and only while nothing of an answer was sent.
4. A request under which an engine died runs once more only if others ran there too: see `suspects.py`.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

from proxy.errors import ApiError, EngineBroken, EngineTimeout, EngineUnavailable
from proxy.fleet.beginning import read_beginning
from proxy.fleet.load import Lease
from proxy.fleet.replica import Replica
from proxy.fleet.routing import Routing
from proxy.http import BytesResponse, Response

if TYPE_CHECKING:
    from proxy.fleet.fleet import Fleet

Work = Callable[[Replica], Awaitable[Response]]

_COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d{1,9})')
_TAIL = 4096
"""Bytes at the end of a body in which its usage is looked for."""
_BAD_STATUSES = frozenset({500, 502, 503, 504})
"""Answers that another replica may do better."""


class Dispatch:
    """Sends one request."""

    def __init__(self, fleet: "Fleet", routing: Routing, work: Work) -> None:
        self._fleet = fleet
        self._routing = routing
        self._work = work
        self._holder = fleet.prefix_caches.holder(routing)
        self._may_rerun = routing.repeatable

    async def run(self) -> Response:
        """The response of the first replica that does well; its beginning was read.

        Raises: as `Fleet.send`.
        """
        fleet = self._fleet
        digest = self._routing.digest
        if digest is not None and fleet.suspects and fleet.suspects.refuses(digest()):
            raise EngineBroken(
                "an engine died under an equal request a short while ago: it is not run again for a minute",
                code="engine_died",
            )
        error: ApiError | None = None
        bad: tuple[Replica, Response] | None = None
        place = await fleet.place(self._routing)
        lease: Lease | None = place.lease
        for replica in [place.replica, *place.others]:
            if lease is None and not fleet.in_use(replica):
                continue
            try:
                taken, lease = lease or replica.load.begin(self._routing.ids), None
                response = await self._attempt(replica, taken)
            except EngineUnavailable as problem:
                replica.mark_down(problem)
                error = problem if not isinstance(error, EngineTimeout) else error
                continue
            except EngineTimeout as problem:
                fleet.failed(replica, problem)
                error = problem
                if problem.received and not self._rerun():
                    raise
                continue
            except EngineBroken as problem:
                error = problem
                if not await self._survived(replica, problem) or not self._rerun():
                    raise
                continue
            if response.status not in _BAD_STATUSES:
                if bad is not None:
                    fleet.failed(bad[0], EngineBroken(f"{bad[0].name} answered {bad[1].status}"))
                return response
            if bad is not None or not await self._survived(replica) or not self._rerun():
                return response
            bad = replica, response
        if bad is not None:
            return bad[1]
        raise fleet.nothing_responds() if error is None or isinstance(error, EngineUnavailable) else error

    async def _attempt(self, replica: Replica, lease: Lease) -> Response:
        """The response of one replica, its beginning read; it counts as running until it is closed."""
        routing, fleet = self._routing, self._fleet
        # one that belongs to no conversation counts as one of its own while it runs
        key = routing.conversation or f"request/{id(lease)}"
        lease.to_read = routing.ids - (routing.reused if replica.name == self._holder else 0)
        lease.last_try = not self._may_rerun
        replica.breaker.started(lease)
        fleet.conversations.begin(key, replica.name, routing.ids)
        leased = _Leased(fleet, replica, lease, key, ends=not routing.conversation, broke=self._survived)
        try:
            async with asyncio.timeout(None) as lease.deadline:
                response = await self._work(replica)
                response = await read_beginning(response, replica.name, completion=routing.completion)
        except TimeoutError as error:
            leased.end()
            raise EngineTimeout(f"{replica.name} did not respond in time", received=True) from error
        except (EngineBroken, EngineTimeout) as problem:
            if isinstance(problem, EngineBroken):
                replica.note_break()
            leased.end()
            raise
        except BaseException:  # cancellation too: the request no longer counts as load of the replica
            leased.end()
            raise
        leased.attach(response)
        return response if isinstance(response, BytesResponse) else leased

    def _rerun(self) -> bool:
        """Whether the request may run once more; the second time it may not."""
        allowed, self._may_rerun = self._may_rerun, False
        return allowed

    async def _survived(self, replica: Replica, problem: EngineBroken | None = None) -> bool:
        """Whether the request may run again after it failed on a replica.

        Args:
            problem: what counts against the replica, if its engine still responds.
        """
        if await replica.confirm():
            if problem is not None:
                self._fleet.failed(replica, problem)
            return True
        if self._routing.digest is None:
            return True
        alone = replica.breaks.alone
        death = (replica.name, replica.breaks.at)
        return self._fleet.suspects.engine_died(self._routing.digest(), death, alone=alone)


def completion_ids(body: bytes) -> int | None:
    """How many ids were sampled, as the usage of a completion or of a stream's last chunks tells; a guess."""
    found = _COMPLETION_TOKENS.findall(body, max(0, len(body) - _TAIL))
    return int(found[-1]) if found else None


class _Leased:
    """The response to a request that counts as running until it is closed."""

    def __init__(
        self,
        fleet: "Fleet",
        replica: Replica,
        lease: Lease,
        conversation: str,
        *,
        ends: bool,
        broke: Callable[[Replica, EngineBroken], Awaitable[bool]],
    ) -> None:
        """A request that runs.

        Args:
            ends: whether the conversation is over with this request.
            broke: called when the connection breaks in the middle of the response.
        """
        self._ends = ends
        self._broke = broke
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._fleet = fleet
        self._replica = replica
        self._lease = lease
        self._conversation = conversation
        self._response: Response | None = None

    def attach(self, response: Response) -> None:
        """The beginning of the response was read."""
        replica = self._replica
        self.status, self.headers, self._response = response.status, response.headers, response
        if response.status in _BAD_STATUSES:
            replica.note_break()  # its engine may be dying: see `Dispatch._survived`
        replica.load.answered(self._lease)
        if isinstance(response, BytesResponse):
            if response.status < 400:
                self._completed(completion_ids(response.body) or 0)
            if response.status not in _BAD_STATUSES:
                replica.breaker.succeeded()
            self.end()
        elif replica.breaker.on_trial:
            replica.breaker.succeeded()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body's bytes."""
        assert self._response is not None
        load, last, events = self._replica.load, b"", 0
        try:
            async for chunk in self._response.chunks():
                load.progress()
                events += chunk.count(b"data:")
                last = chunk
                yield chunk
        except EngineBroken as problem:
            self._replica.note_break()
            await self._broke(self._replica, problem)
            raise
        except EngineTimeout as problem:
            self._fleet.failed(self._replica, problem)
            raise
        self._replica.breaker.succeeded()
        self._completed(completion_ids(last) or events)

    def _completed(self, ids: int) -> None:
        if ids:
            self._replica.load.completed(self._lease, ids)
            self._fleet.expected_length.measure(ids)

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def aclose(self) -> None:
        """See `Response.aclose`."""
        self.end()
        if self._response is not None:
            await self._response.aclose()

    def end(self) -> None:
        """The request no longer runs."""
        self._fleet.ended(self._replica, self._lease)
        if self._conversation:
            self._fleet.conversations.finish(self._conversation)
            if self._ends:
                self._fleet.conversations.end(self._conversation)
            self._conversation = ""
