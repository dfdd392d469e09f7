"""A stream of chunks that is recorded on its way to the client."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from time import monotonic
from weakref import WeakMethod

from tokenproxy.base.errors import ApiError, EngineBroken
from tokenproxy.base.fields import raw
from tokenproxy.base.http import Response
from tokenproxy.base.types import Fields
from tokenproxy.engine.sse import DONE, data_event, event_data, split_events
from tokenproxy.fleet.weight_state import WeightTag
from tokenproxy.record.recorder import Recording
from tokenproxy.record.retries import KEPT_BYTES, Attempt
from tokenproxy.record.vocabulary import ABORTED
from tokenproxy.turn import parsing, wire
from tokenproxy.turn.answer import StreamedAnswer
from tokenproxy.turn.reader import CompletionReader, holds_more
from tokenproxy.turn.rest import split_end
from tokenproxy.turn.resume import Resume
from tokenproxy.turn.usual import UsualChunk

_CHUNK = "chat.completion.chunk"
_QUIET_S = 0.05
"""A stream to which nothing was added for so long has no event on its way from an engine that is paused."""
_USAGE_S = 0.05
"""vLLM sends the usage directly after the event that ends the last turn."""


class RecordedStream:
    """Passes a stream on, and reads its turns from it. What arrived together is sent together.

    A turn is recorded before the client gets the event that ends it, so that a request that follows this
    event finds the turn, in another process too. The event that ends the last turn waits for the usage, which
    tells how many ids of the prompt were cached.
    """

    def __init__(
        self,
        response: Response,
        answer: StreamedAnswer,
        recording: Recording,
        attempt: Attempt,
        cleanup: AsyncExitStack,
        tag: WeightTag,
        resume: Resume,
        *,
        usage_s: float = _USAGE_S,
    ) -> None:
        """A stream that is about to be sent.

        Args:
            response: its chunks end where events end, as those of `Fleet.send` do.
            cleanup: closed with the stream. It closes the response.
            tag: learns where in the stream the weights changed.
            resume: goes on with the turn if its engine breaks off.
            usage_s: how long the event that ends the last turn waits for the usage.
        """
        self.status = response.status
        self.headers = [pair for pair in response.headers if pair[0] != b"content-length"]
        self._response = response
        self._blocks = response.chunks()
        self._next: asyncio.Task[bytes] | None = None
        """Reads the next block, for which `_arrives` waited."""
        plan = recording.plan
        choices = plan.request.choices * len(plan.prompts)
        self._reader = CompletionReader(choices, plan.prompt, plan.batch)
        self._answer = answer
        self._recording = recording
        self._attempt = attempt
        self._cleanup = cleanup
        self._resume = resume
        self._first: Fields | None = None
        """The fields that all chunks have, of the first one."""
        self._aborted = False
        """Whether they say that the engine aborted a choice."""
        self._ends: list[bytes] = []
        """Events with which the engine breaks off. They are handled if the turn does not go on."""
        self._usage_s = usage_s
        self._sent: list[bytes] | None = [] if attempt.retriable else None
        """The bytes kept for a retry; None if they are too long, or if no retry is possible."""
        self._sent_bytes = 0
        self._done = self._broken_off = False
        self._ready: list[bytes] = []
        """Events that the client was not sent yet."""
        self._held_until: float | None = None
        """Set while they begin with the event that ends the last turn: when they are sent at the latest."""
        self._waiting_since: float | None = None
        """Since when nothing has arrived; None while something that arrived is handled."""
        progress = WeakMethod(self._progress)  # what is sampled of a stream must not keep it in memory
        tag.progress = lambda: None if (method := progress()) is None else method()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events, as the client gets them.

        Raises:
            EngineBroken: the connection breaks, an event is not a chunk, or the stream ends before the turn.
            Unavailable: the response is not stored, and its client could not go on without that.
        """
        try:
            while True:
                try:
                    pending, self._next = self._next, None
                    block = await (pending or anext(self._blocks))
                except StopAsyncIteration:
                    if not await self._goes_on("ended"):
                        break
                    continue
                except EngineBroken:
                    if not await self._goes_on("broken"):
                        raise
                    continue
                self._waiting_since = None
                for event in split_events(block):
                    if (work := self._add(event)) is not None:
                        if before := self._sendable():
                            yield before
                        await work()
                if sendable := self._sendable():
                    yield sendable
                self._waiting_since = monotonic()
                held_until = self._held_until
                if held_until is not None and not await self._arrives(held_until - monotonic()):
                    yield await self._release()
            if held := await self._release():
                yield held
            if not (self._done or self._reader.complete or self._reader.failed):
                raise EngineBroken("the engine ended its stream before the turn ended")
        except ApiError as error:
            if last := await self._release() + self._answer.broken(error):
                yield last
            raise
        finally:
            # the client left, or the engine's stream ended early: record what arrived so far
            await self._recording.add(self._reader.rest())

    async def read(self) -> bytes:
        """All events."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def aclose(self) -> None:
        """Record the ids sampled so far if the client left early, and close the engine's response."""
        async with self._cleanup:
            self._recording.add_later(self._reader.rest())
            if self._next is not None:
                self._next.cancel()
                await asyncio.gather(self._next, return_exceptions=True)

    async def _arrives(self, seconds: float) -> bool:
        """Whether the next block, the end or a failure of the stream arrives within `seconds`."""
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._blocks))
        await asyncio.wait((self._next,), timeout=seconds)
        return self._next.done()

    def _progress(self) -> dict[int, int] | None:
        """Number of sampled ids by choice; None if more may have arrived, or may be about to arrive."""
        since = self._waiting_since
        return self._reader.progress() if since is not None and monotonic() - since >= _QUIET_S else None

    async def _goes_on(self, why: str) -> bool:
        """Whether blocks follow after a break: of the next engine, events that were held, or the end."""
        if self._done or self._reader.failed:
            return False
        held, self._ends = self._ends, []
        rests, first = self._reader.rests(), self._first
        if held:
            why, self._aborted = (ABORTED if self._aborted else "error"), False
        prompt = self._reader.prompt
        if first is not None and prompt and await self._resume.end_segment(rests, why):
            await self._response.aclose()  # it counts as running until then
            self._reader.drop_facts()
            ended = self._reader.sampled - sum(len(rest.sampled) for rest in rests)
            self._blocks = self._resume.events(rests, first, prompt, ended, told=self._reader.usage_read)
            return True
        self._resume.give_up()
        self._blocks = _each(held)
        return bool(held)

    def _without_end(self, event: bytes, chunk: wire.Completion) -> wire.Completion | None:
        """Hold the end of a chunk with which the engine breaks off. Returns its rest; None if it has none."""
        if not chunk.choices:
            self._aborted |= wire.is_set(chunk.usage)
            self._ends.append(event)  # an error, or the usage of a turn that may go on
            return None
        self._aborted |= any(choice.finish_reason == ABORTED for choice in chunk.choices)
        rest, end = split_end(event_data(event) or b"{}")
        self._ends.append(data_event(end))
        return parsing.parse(rest) if any(map(holds_more, chunk.choices)) else None

    def _add(self, event: bytes) -> Callable[[], Awaitable[None]] | None:
        """Read an event, and write what the client gets of it.

        Returns: what is to be done after the events before it were sent; usually None.

        Raises:
            EngineBroken: it is not a chunk.
        """
        usual = UsualChunk.match(event)
        if usual is not None and self._reader.add(usual):
            self._show(self._answer.usual(event, usual))
            return None
        data = event_data(event)
        if data is None:
            self._ready.append(event)  # a comment, which keeps the connection alive
            return None
        if data == DONE and self._ends:
            self._ends.append(event)
            return None
        if data == DONE:
            return self._end
        chunk = parsing.parse(data)
        if self._first is None:
            head = {"id": chunk.id or "", "created": chunk.created or 0, "model": chunk.model or ""}
            self._first = {name: raw(value) for name, value in (head | {"object": _CHUNK}).items()}
        breaks_off = self._resume.covers(chunk, complete=self._reader.complete)
        if breaks_off or (self._ends and not chunk.choices):
            rest = self._without_end(event, chunk)
            if rest is None:
                return None
            event, chunk = data_event(parsing.encode(rest)), rest
        self._reader.read(chunk)
        if self._reader.ended:
            return partial(self._end_choices, event, chunk)
        self._show(self._answer.event(event, chunk))
        return None

    def _show(self, events: bytes | None) -> None:
        """Events for the client, after those that it was not sent yet."""
        if not events:
            return
        self._ready.append(events)
        if self._sent is not None:
            self._sent_bytes += len(events)
            self._sent.append(events)
            if self._sent_bytes > KEPT_BYTES:
                self._sent = None

    async def _end_choices(self, event: bytes, chunk: wire.Completion) -> None:
        """Record the turns that an event ends, or wait for their usage, before the client gets the event."""
        if self._reader.awaits_usage:
            self._held_until = self._held_until or monotonic() + self._usage_s
        else:
            await self._record_ended()
        self._show(self._answer.event(event, chunk))

    def _sendable(self) -> bytes:
        """The events that may be sent now, which are then no longer in `_ready`."""
        if self._held_until is not None:
            return b""
        sendable = b"".join(self._ready)
        self._ready.clear()
        return sendable

    async def _release(self) -> bytes:
        """Record a turn that waits for its usage without it. Returns the events that waited too."""
        await self._record_ended()
        return self._sendable()

    async def _record_ended(self) -> None:
        ended = self._reader.rest(ended=True)
        self._broken_off |= ended.broken_off
        await self._recording.add(ended)
        self._held_until = None

    async def _end(self) -> None:
        self._done = True
        complete = self._reader.complete
        await self._record_ended()
        await self._recording.add(self._reader.rest())
        end = self._answer.end()
        await self._answer.settle()
        self._show(end)
        if complete and not self._broken_off and self._sent is not None:
            await self._attempt.keep(self.status, self.headers, b"".join(self._sent))


async def _each(blocks: list[bytes]) -> AsyncIterator[bytes]:
    for block in blocks:
        yield block
