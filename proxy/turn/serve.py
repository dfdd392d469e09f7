"""How a chat completion ends: its turn is recorded, and its answer kept for a retry, whatever ends it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proxy.engine.sse import events
from proxy.errors import ApiError, BadRequest, EngineBroken
from proxy.history.evidence import Outcome
from proxy.history.plan import Plan
from proxy.history.retries import KEPT_BYTES, Attempt
from proxy.history.store import StoreError
from proxy.http import BytesResponse, Response, is_event_stream
from proxy.turn.completion import DONE, ChunkReader, Wanted, take_whole
from proxy.turn.services import Services
from proxy.types import Headers

_WORTH_A_RETRY = frozenset({408, 409, 429})
"""Statuses below 500 on which SDKs send a request again."""
_LARGE = 65_536
"""Bytes of a body that is read on a thread."""


class Conclusion:
    """What becomes of one attempt. The first word counts; without a store nothing is kept."""

    def __init__(self, gateway: Services, attempt: Attempt) -> None:
        self._rollouts = gateway.rollouts
        self._retries = gateway.retries
        self._attempt = attempt
        self._open = False

    async def begin(self) -> Response | None:
        """The answer that an equal request got before, if this is a repetition of it.

        Raises:
            BadRequest: see `Retries.begin`.
        """
        try:
            replay = await self._retries.begin(self._attempt)
        except StoreError as error:
            self._rollouts.complain("a retry cannot be told from a new request", error)
            return None
        if replay is None:
            self._open = True
            if self._attempt.again:
                self._rollouts.metrics.retries.labels("run_anew").inc()
            return None
        self._rollouts.metrics.retries.labels("answered_again").inc()
        headers = [*replay.headers, (b"x-request-replayed", b"true")]
        return BytesResponse(replay.status, headers, replay.body)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """What fails inside, or is left by its client, leaves no answer worth keeping."""
        try:
            yield
        except ApiError as error:
            await self.refused(error.status)
            raise
        except BaseException:
            self.failed()
            raise

    async def done(self, status: int, headers: Headers, body: bytes) -> None:
        """The answer is complete."""
        if self._open:
            self._open = False
            try:
                await self._retries.done(self._attempt, status, headers, body)
            except StoreError as error:
                self._rollouts.complain("an answer was not kept for a retry", error)

    async def refused(self, status: int) -> None:
        """There is an error for the client; a retry that comes at once is to find it remembered."""
        if self._open and (status >= 500 or status in _WORTH_A_RETRY):
            self._open = False
            await self._remember_failure()
        elif self._open:
            self._open = False
            self._retries.abandon(self._attempt)

    def failed(self) -> None:
        """There is no answer worth keeping: the client left, or the engine broke."""
        if self._open:
            self._open = False
            self._rollouts.spawn(self._remember_failure(), "record")

    async def _remember_failure(self) -> None:
        try:
            await self._retries.failed(self._attempt)
        except StoreError as error:
            self._rollouts.complain("a failed request was not remembered", error)


async def recorded_answer(
    answer: Response, plan: Plan, wanted: Wanted, gateway: Services, conclusion: Conclusion
) -> Response:
    """The answer for the client, which records its turn on the way.

    Raises:
        EngineBroken: the engine answered something that is no chat completion.
    """
    if answer.status >= 400:
        await conclusion.refused(answer.status)
        return answer
    if is_event_stream(answer.headers):
        return RecordedStream(answer, plan, wanted, gateway, conclusion)
    try:
        body = await answer.read()
    finally:
        await answer.aclose()
    try:
        if len(body) < _LARGE:
            outcome, mine = take_whole(body, wanted)
        else:
            outcome, mine = await gateway.in_thread(lambda: take_whole(body, wanted))
    except BadRequest as error:
        raise EngineBroken("the engine answered something that is no chat completion") from error
    await gateway.rollouts.surely(
        gateway.rollouts.record(plan, outcome), conclusion.done(answer.status, answer.headers, mine)
    )
    return BytesResponse(answer.status, answer.headers, mine)


class RecordedStream:
    """A stream that goes on to the client event by event, while its turn is taken out of it.

    A turn is recorded before the client gets the event that ends it, so that whoever acts on that finds it.
    """

    def __init__(
        self, answer: Response, plan: Plan, wanted: Wanted, gateway: Services, conclusion: Conclusion
    ) -> None:
        self.status = answer.status
        self.headers = [pair for pair in answer.headers if pair[0] != b"content-length"]
        self._answer = answer
        self._plan = plan
        self._reader = ChunkReader(wanted, plan.choices)
        self._rollouts = gateway.rollouts
        self._conclusion = conclusion
        self._sent: list[bytes] = []
        self._sent_bytes = 0

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events as the engine sends them."""
        try:
            async for data in events(self._answer.chunks()):
                kept = None if data == DONE else self._reader.take(data)
                await self._record(self._reader.ended())
                if (last := self._reader.held(data)) is not None:
                    yield self._event(last)
                if kept is not None:
                    yield self._event(kept)
                if data == DONE:
                    await self._complete()
                    yield b"data: [DONE]\n\n"
        except ApiError:
            if (last := self._reader.held(DONE)) is not None:
                yield self._event(last)
            raise
        finally:
            # the client left, or the engine broke or fell silent: nothing of what came is lost
            await self._record(self._reader.rest())

    async def read(self) -> bytes:
        """All events."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def aclose(self) -> None:
        """Record what was sampled so far if the client left before the end, and close the engine's answer."""
        rest = self._reader.rest()
        if rest.choices:
            self._rollouts.record_later(self._plan, rest)
        self._conclusion.failed()
        await self._answer.aclose()

    async def _record(self, outcome: Outcome) -> None:
        if outcome.choices:
            await self._rollouts.surely(self._rollouts.record(self._plan, outcome))

    async def _complete(self) -> None:
        complete = self._reader.complete
        await self._record(self._reader.rest())
        if complete and self._sent_bytes <= KEPT_BYTES:
            body = b"".join([*self._sent, b"data: [DONE]\n\n"])
            await self._conclusion.done(self.status, self.headers, body)

    def _event(self, data: bytes) -> bytes:
        """An event for the client, which is kept for a retry if it is not too long."""
        event = b"data: " + data + b"\n\n"
        self._sent_bytes += len(event)
        if self._sent_bytes <= KEPT_BYTES:
            self._sent.append(event)
        return event
