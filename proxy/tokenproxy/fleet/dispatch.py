"""One request on its way to a replica, and to another one where that is safe.

1. A replica that accepts no connection costs nothing: the next one gets the request.
2. The beginning of the answer is read before anything is sent to the client: the first event of a stream,
   the whole of another completion. After a failure until then the request runs at most once more.
3. A completion that gets a 404 runs once more, too: the replica may lack the adapter. A 404 comes at once, so
   that such a replica would look idle and get ever more requests: see `Replica.lacks`.
4. A completion that an engine refuses because it is paused waits until the engine is resumed, and is sent
   again: it never ran. Where another replica is not paused, it runs there.
5. A request under which an engine died runs once more only if others ran there too: see `Suspects`.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from tokenproxy.base.errors import ApiError, EngineBroken, EngineTimeout, EngineUnavailable
from tokenproxy.base.http import BytesResponse, Response, header, is_event_stream
from tokenproxy.engine.sse import whole_events
from tokenproxy.fleet.admission import ActiveConversation
from tokenproxy.fleet.choosing import Routing
from tokenproxy.fleet.load import Lease
from tokenproxy.fleet.replica import Replica
from tokenproxy.monitoring.exchange import queued

if TYPE_CHECKING:
    from tokenproxy.fleet.fleet import Fleet

Work = Callable[[Replica], Awaitable[Response]]

REFUSED_S = 60.0
"""How long a request that ended an engine is refused."""
_REMEMBERED_DEATHS = 4096
_SUSPECT, ALONE, AMONG_OTHERS, GOES_ON = 4, 4, 2, 1
"""The suspicion at which a request is refused; and what a death adds to it, by how the request ran."""
_JSON = b"application/json"
_ERROR_EVENT = re.compile(rb'(?:event: ?error\r?\n)?data: ?(\{"error".*\})\r?\n\r?\n')
_BAD_STATUSES = frozenset({500, 502, 503, 504})
"""Answers that another replica may do better."""
_PAUSED_STATUS = 503
_PAUSED = b"Generation is paused"
"""In the error with which vLLM refuses requests while it is paused; from 0.33 on, unless it keeps them."""


@dataclass(slots=True)
class Suspects:
    """Requests under which engines died: one that kills engines must not kill the whole fleet.

    Nothing tells which of the requests that ran on an engine ended it, or whether one of them did. One that
    ran alone is the suspect; of several each may run once more, and one that sees a second engine die is the
    suspect then; one that may go on from its ids, only after four: it runs for long. Engines count only if
    they die one after the other: the samples of a group are equal requests, and run on all engines of a
    machine that fails. A suspect is refused for a while, also where its client sends it again.
    """

    clock: Callable[[], float] = time.monotonic
    total: int = 0
    """Number of deaths that counted, of all requests."""
    deaths: dict[bytes, tuple[int, int, float]] = field(default_factory=dict)
    """By digests of the requests: their suspicion, and the number and the time of the last death."""

    def engine_died(self, digest: bytes, total: int, suspicion: int) -> bool:
        """An engine died under a request; returns whether the request may run once more.

        Args:
            total: that of the time when the request was sent to the engine. If another engine died under it
                or an equal request since then, this death is no further reason to suspect it.
            suspicion: one of the constants.
        """
        now = self.clock()
        if len(self.deaths) > _REMEMBERED_DEATHS:
            self.deaths = {key: each for key, each in self.deaths.items() if now - each[2] < REFUSED_S}
        count, last, at = self.deaths.get(digest, (0, 0, now))
        if now - at >= REFUSED_S:
            count, last = 0, 0
        if total >= last:
            self.total += 1
            count, last = count + suspicion, self.total
        self.deaths[digest] = count, last, now
        return count < _SUSPECT

    def refuses(self, digest: bytes) -> bool:
        """Whether the request ended an engine a short while ago."""
        count, _, at = self.deaths.get(digest, (0, None, 0.0))
        return count >= _SUSPECT and self.clock() - at < REFUSED_S


async def send(fleet: "Fleet", work: Work, routing: Routing) -> Response:
    """Send a request to the replica that the policy chooses, and to another one if that fails.

    The response counts as running until it is closed. Its beginning was read. The chunks of an event stream
    end where events end.

    Args:
        work: sends the request to a replica and returns the response.

    Raises:
        EngineUnavailable: no replica responds.
        Overloaded: too many requests wait for a replica, or this one waited for too long.
        EngineTimeout: no replica accepted a connection in time, or one did not answer in time.
        EngineBroken: a replica broke under the request, and it may not run again.
    """
    digest, suspects = routing.digest, fleet.suspects
    if digest is not None and suspects.deaths and suspects.refuses(digest()):
        raise EngineBroken(
            "an engine died under this request a short while ago: it is not run again for a minute",
            code="engine_died",
        )
    error: ApiError | None = None
    bad: tuple[Replica, Response] | None = None
    tried: list[Replica] = []
    may_rerun = routing.repeatable
    hold_until = fleet.clock() + fleet.weights.timeout_s
    run: Run | None = await fleet.acquire(routing)
    while run is not None:
        replica = run.replica
        tried.append(replica)
        try:
            response = await run.attempt(work, last_try=not may_rerun)
        except EngineUnavailable as problem:
            replica.mark_down(problem)
            error = problem if not isinstance(error, EngineTimeout) else error
        except EngineTimeout as problem:
            fleet.failed(replica, problem)
            error = problem
            if problem.received and not may_rerun:
                raise
            may_rerun = may_rerun and not problem.received
        except EngineBroken as problem:
            error = problem
            if not await run.survived(problem) or not may_rerun:
                raise
            may_rerun = False
        else:
            paused = response.status == _PAUSED_STATUS and _says_paused(response)
            if paused and fleet.clock() < hold_until:
                run = None if fleet.weights.suspension.active else fleet.next_run(routing, tried)
                if run is None:
                    with queued():
                        await fleet.weights.pause_ended(replica, hold_until)
                    tried, run = [], await fleet.acquire(routing)
                continue
            lacks_model = response.status == 404 and routing.completion
            if not lacks_model and response.status not in _BAD_STATUSES:
                if bad is not None:
                    fleet.did_worse(*bad, routing)
                return response
            if not (lacks_model or await run.survived()) or bad is not None or not may_rerun:
                return response
            bad, may_rerun = (replica, response), False
        run = fleet.next_run(routing, tried)
    if bad is not None:
        return bad[1]
    raise fleet.nothing_responds() if error is None or isinstance(error, EngineUnavailable) else error


def _says_paused(response: Response) -> bool:
    """Whether an engine refused a request, with `_PAUSED_STATUS`, only because it is paused."""
    return isinstance(response, BytesResponse) and _PAUSED in response.body


class Run(Lease):
    """A request that counts as running on a replica until it ends; the response, if that is a stream."""

    def __init__(
        self, fleet: "Fleet", replica: Replica, routing: Routing, first: ActiveConversation | None = None
    ) -> None:
        """Count the request as running.

        Args:
            first: its conversation, if that is not active.
        """
        super().__init__(routing.ids, samples=routing.completion)
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.replica = replica
        self._fleet = fleet
        self._routing = routing
        self._deaths = fleet.suspects.total
        """Those before it was sent."""
        replica.load.begin(self)
        replica.breaker.started(self)  # at once: the next in the queue must not be a second trial
        if routing.conversation:
            fleet.queue.renew(fleet.conversations.begin(routing, replica, first), replica.cache)
        self._response: Response | None = None
        self._chunks: AsyncIterator[bytes]
        self._first: bytes | None = None

    async def attempt(self, work: Work, *, last_try: bool) -> Response:
        """The response, its beginning read; the request counts as running until it is closed."""
        replica, self.last_try = self.replica, last_try
        response: Response | None = None
        try:
            async with asyncio.timeout(None) as self.deadline:
                response = await work(replica)
                begun = await self._begun(response)
        except BaseException as error:  # cancellation too: the request no longer counts as load
            self.end()
            if response is not None:
                await response.aclose()
            if isinstance(error, TimeoutError):
                raise EngineTimeout(f"{replica.name} did not respond in time", received=True) from error
            raise
        replica.load.answered(self)
        if isinstance(begun, BytesResponse):
            paused = begun.status == _PAUSED_STATUS and _says_paused(begun)
            if begun.status not in _BAD_STATUSES or paused:
                replica.breaker.succeeded()
            self.end()
        elif replica.breaker.trial is not None:
            replica.breaker.succeeded()
        if begun.status < 400 and len(self._fleet.replicas) > 1:
            for prompt in self._routing.prompts:
                self._fleet.prefix_caches.note(prompt, replica.name)
        return begun

    async def survived(self, problem: EngineBroken | None = None, *, sampling: bool = False) -> bool:
        """Whether the request may run again after it failed on the replica.

        Args:
            problem: what counts against the replica, if its engine still responds.
            sampling: whether the engine had sampled for it.
        """
        replica, digest = self.replica, self._routing.digest
        if await replica.confirm():
            if problem is not None:
                self._fleet.failed(replica, problem)
            return True
        if digest is None:
            return True
        suspicion = ALONE if self.alone else AMONG_OTHERS
        if self._routing.goes_on and (sampling or suspicion == AMONG_OTHERS):
            suspicion = GOES_ON
        return self._fleet.suspects.engine_died(digest(), self._deaths, suspicion)

    async def _begun(self, response: Response) -> Response:
        """The response, its beginning read: itself for a stream, else the whole body.

        Raises:
            EngineBroken: the engine hangs up, or the response is no completion where it must be one.
            EngineTimeout: its body came too slowly.
        """
        completion, name = self._routing.completion, self.replica.name
        kind = header(response.headers, b"content-type")
        is_stream, succeeded = is_event_stream(response.headers), response.status < 400
        if succeeded and (is_stream or not completion):
            chunks = response.chunks()
            self._chunks = whole_events(chunks) if is_stream else chunks
            self._first = await anext(self._chunks, None)
            if completion and self._first is None:
                raise EngineBroken(f"{name} returned an empty stream")
            found = _ERROR_EVENT.match(self._first or b"") if completion else None
            if found is not None and (error := _error_of(found[1])) is not None:
                await response.aclose()
                return error
            self.status, self.headers, self._response = response.status, response.headers, response
            return self
        body = await response.read()
        if succeeded and not (kind.startswith(_JSON) and body.lstrip().startswith(b"{")):
            shown = kind.decode("latin-1") or "no content type"
            raise EngineBroken(f"{name} returned no chat completion but {len(body)} bytes of {shown}")
        await response.aclose()
        return BytesResponse(response.status, response.headers, body)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body's bytes; those of an event stream end where events end."""
        replica = self.replica
        chunk, self._first = self._first, None
        try:
            while chunk is not None:
                replica.load.progress()
                yield chunk
                chunk = await anext(self._chunks, None)
        except EngineBroken as problem:
            await self.survived(problem, sampling=True)
            raise
        except EngineTimeout as problem:
            self._fleet.failed(replica, problem)
            raise
        replica.breaker.succeeded()

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def aclose(self) -> None:
        """See `Response.aclose`."""
        self.end()
        if self._response is not None:
            await self._response.aclose()

    def end(self) -> None:
        """The request no longer runs: one that waits may run instead. A second call does nothing."""
        fleet, running = self._fleet, self.replica.load.running
        if self not in running:
            return
        running.remove(self)
        self.replica.breaker.ended(self)
        fleet.conversations.finish(self._routing.conversation)
        if fleet.queue.waiting:
            fleet.queue.wake()


def _error_of(body: bytes) -> BytesResponse | None:
    """The error with which an engine begins a stream, as a response with its status; None if it is none."""
    try:
        code = msgspec.json.decode(body)["error"].get("code")
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError):
        return None
    status = code if isinstance(code, int) and 400 <= code <= 599 else 500
    return BytesResponse(status, [(b"content-type", _JSON)], body)
