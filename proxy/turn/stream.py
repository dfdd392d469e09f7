"""A stream of chunks that is recorded on its way to the client."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from proxy.engine.sse import events
from proxy.history.plan import prompt_of
from proxy.history.recorder import Recording
from proxy.history.retries import KEPT_BYTES, Attempt
from proxy.http import Response
from proxy.turn.reader import DONE, StreamReader
from proxy.turn.redactor import StreamRedactor
from proxy.turn.request import ChatRequest


class RecordedStream:
    """A stream that is passed on event by event while its turns are read out of it.

    A turn is recorded before the client gets the event that ends it, so that whoever acts on that event finds
    the turn, in another process too.
    """

    def __init__(
        self,
        response: Response,
        request: ChatRequest,
        recording: Recording,
        attempt: Attempt,
        cleanup: AsyncExitStack,
    ) -> None:
        self.status = response.status
        self.headers = [pair for pair in response.headers if pair[0] != b"content-length"]
        self._response = response
        self._reader = StreamReader(request.choices, prompt_of(recording.plan))
        self._redactor = StreamRedactor(request.visible)
        self._recording = recording
        self._attempt = attempt
        self._cleanup = cleanup
        self._sent: list[bytes] | None = [] if attempt.wants_body else None
        """What a retry would get; None if it is too long, or if no retry can come."""
        self._sent_bytes = 0

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events, with what the client asked to see."""
        try:
            async for data in events(self._response.chunks()):
                if data == DONE:
                    yield await self._end()
                    continue
                self._reader.read(data)
                await self._recording.add(self._reader.ended())
                if (visible := self._redactor.redact(data)) is not None:
                    yield self._event(visible)
        finally:
            # the client left, or the engine broke or ended early: what came so far is not lost
            await self._recording.add(self._reader.rest())

    async def read(self) -> bytes:
        """All events."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def aclose(self) -> None:
        """Record what was sampled so far if the client left early, and close the engine's response."""
        self._recording.add_later(self._reader.rest())
        self._attempt.abandon()
        await self._response.aclose()
        await self._cleanup.aclose()

    async def _end(self) -> bytes:
        complete = self._reader.complete
        await self._recording.add(self._reader.rest())
        last = self._event(DONE)
        if complete and self._sent is not None:
            await self._attempt.keep(self.status, self.headers, b"".join(self._sent))
        return last

    def _event(self, data: bytes) -> bytes:
        event = b"data: " + data + b"\n\n"
        if self._sent is not None:
            self._sent_bytes += len(event)
            self._sent.append(event)
            if self._sent_bytes > KEPT_BYTES:
                self._sent = None
        return event
