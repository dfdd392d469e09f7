"""Answers in another wire format than the engine's, and streams of them that begin in time."""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from tokenproxy.base.errors import ApiError
from tokenproxy.base.http import EVENT_HEADERS, BytesResponse, Response, is_event_stream, read_and_close
from tokenproxy.base.types import Headers
from tokenproxy.engine.protocol import problem_of
from tokenproxy.engine.sse import event_data, split_events
from tokenproxy.record.completion import Completion
from tokenproxy.record.echo import Signer, TurnTokens
from tokenproxy.record.vocabulary import BROKEN_OFF
from tokenproxy.turn import wire
from tokenproxy.turn.answer import StreamedAnswer
from tokenproxy.turn.usual import UsualChunk


class Translation(StreamedAnswer):
    """Writes one response in a wire format, which has one output: of several choices, the first."""

    keep_alive = b": keep-alive\n\n"
    """The event that is sent while the engine is silent."""
    reasoning = True
    """Whether the client gets the reasoning."""
    signer: Signer | None = None
    """Makes the tokens that clients send back; None while the store does not respond."""
    tenant = ""
    """The tenant whose request is answered."""

    def __init__(self) -> None:
        self._begun = self._ended = False
        self.head = wire.Completion()
        """The completion, or the first chunk."""
        self._usage: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
        self.finish: str | None = None

    @property
    def tokens(self) -> TurnTokens | None:
        """Makes the tokens of the turn; None for a turn that is not recorded."""
        return TurnTokens(self.signer, self.tenant, self.turn_id) if self.signer and self.turn_id else None

    @property
    def broken_off(self) -> str:
        """Why the turn is not complete; empty if the engine ended it."""
        ended = self.finish not in BROKEN_OFF
        return "" if ended else f"the engine ended the turn before it was complete ({self.finish})"

    @property
    def usage(self) -> wire.Usage:
        """The last one that the engine reported."""
        return wire.usage_of(self._usage) or wire.Usage()

    def thought(self, message: dict[str, Any]) -> str:
        """The reasoning in a message, or in a piece of one, that the client gets."""
        return wire.thought_of(message) if self.reasoning else ""

    def whole(self, whole: wire.Completion, body: bytes, read: Completion) -> bytes:
        """See `Answer.whole`. Raises EngineBroken."""
        choice = (whole.choices or (wire.Choice(),))[0]
        choice.index = 0
        self._read(whole, [choice])
        return self.message(choice)

    def event(self, event: bytes, chunk: wire.Completion) -> bytes:
        """See `StreamedAnswer.event`. Raises EngineBroken."""
        if self._ended:
            return b""
        if wire.is_set(chunk.error):
            problem = problem_of(event_data(event) or b"")
            status = problem.code if isinstance(problem.code, int) and 400 <= problem.code < 600 else 500
            return self.error_event(status, problem.message, problem.name)
        choices = chunk.choices or ()
        self._read(chunk, choices)
        events = self.begin()
        for choice in choices:
            if not choice.index:
                events += self.piece(choice)
        return events

    def usual(self, event: bytes, chunk: UsualChunk) -> bytes:
        """See `StreamedAnswer.usual`."""
        delta = wire.Delta()
        setattr(delta, chunk.field, chunk.text)
        return self.event(event, wire.Completion(choices=(wire.Choice(chunk.choice, delta=delta),)))

    def _read(self, chunk: wire.Completion, choices: Sequence[wire.Choice]) -> None:
        if not self.head.id and chunk.id:
            self.head = chunk
        self._usage = chunk.usage or self._usage
        for choice in choices:
            if choice.finish_reason and not choice.index:
                self.finish = choice.finish_reason

    def begin(self) -> bytes:
        """The events with which a stream begins, although nothing may have been read yet; once."""
        if self._begun:
            return b""
        self._begun = True
        return self.start()

    def end(self) -> bytes:
        """See `StreamedAnswer.end`. Raises EngineBroken."""
        if self._ended:
            return b""
        events = self.begin() + self.finished()
        self._ended = True
        return events

    def error_event(self, status: int, message: str, code: str | None) -> bytes:
        """The last event of a stream for an error of the engine that came after the stream began."""
        self._ended = True
        return self.begin() + self.failed(status, message, code)

    def in_stream(self, status: int, message: str, code: str | None) -> bool:
        """Whether an error is sent as a stream, although no stream began."""
        return False

    @abstractmethod
    def message(self, choice: wire.Choice) -> bytes:
        """The body for a whole completion. Raises EngineBroken."""

    @abstractmethod
    def start(self) -> bytes:
        """See `begin`."""

    @abstractmethod
    def piece(self, choice: wire.Choice) -> bytes:
        """The events for the next piece of the answer. Raises EngineBroken."""

    @abstractmethod
    def finished(self) -> bytes:
        """The events after the last piece. Raises EngineBroken."""

    @abstractmethod
    def failed(self, status: int, message: str, code: str | None) -> bytes:
        """The event that ends a stream with an error."""

    @abstractmethod
    def error(self, status: int, message: str, code: str | None) -> bytes:
        """The body of a response for an error of the engine."""


async def translated_error(response: Response, translation: Translation) -> Response:
    """An error of the engine in the wire format of a translation; any other response as it is."""
    if response.status < 400:
        return response
    problem = problem_of(await read_and_close(response))
    told = (response.status, problem.message, problem.name)
    body = translation.error(*told)
    return _in_stream(translation, *told) or BytesResponse(response.status, response.headers, body)


def _in_stream(translation: Translation, status: int, message: str, code: str | None) -> Response | None:
    """An error that is sent as a stream; None if it is not."""
    if not translation.in_stream(status, message, code):
        return None
    return BytesResponse(200, list(EVENT_HEADERS), translation.error_event(status, message, code))


async def serve_early(
    serve: Callable[[], Coroutine[Any, Any, Response]], translation: Translation, silence_s: float
) -> Response:
    """The response to a streamed turn; after `silence_s` seconds one that begins before the turn.

    Raises:
        ApiError: the turn cannot be served.
    """
    turn = asyncio.create_task(serve())
    try:
        await asyncio.wait([turn], timeout=silence_s)
        if not turn.done():
            return TranslatedStream(turn, EVENT_HEADERS, translation, silence_s)
        response = turn.result()
        if response.status < 400 and is_event_stream(response.headers):
            return TranslatedStream(turn, response.headers, translation, silence_s)
        return await translated_error(response, translation)
    except BaseException as error:  # cancellation too: the engine must stop generating
        await end(turn)
        if isinstance(error, ApiError):
            in_stream = _in_stream(translation, error.status, error.message, error.code)
            if in_stream is not None:
                return in_stream
        raise


class TranslatedStream:
    """A stream in another wire format, kept alive while the engine is silent.

    If the engine has not responded when it begins, an error of the engine is its last event: status and
    headers are sent already.
    """

    status = 200

    def __init__(
        self, turn: "asyncio.Task[Response]", headers: Headers, translation: Translation, silence_s: float
    ) -> None:
        """A stream of the events of a turn.

        Args:
            turn: ends with the response of `serve_turn`.
            silence_s: after how many seconds of silence an event is sent; clients give up after some minutes.
        """
        self.headers = list(headers)
        self.keep_alive = translation.keep_alive
        self.silence_s = silence_s
        self._turn = turn
        self._translation = translation

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events, in blocks of whole events. Raises ApiError."""
        begun = 0
        if not self._turn.done():
            beginning = self._translation.begin()
            begun = len(split_events(beginning))
            yield beginning
        try:
            response = await asyncio.shield(self._turn)
            if response.status >= 400:
                problem = problem_of(await response.read())
                yield self._translation.error_event(response.status, problem.message, problem.name)
                return
        except ApiError as error:
            yield self._translation.broken(error)
            raise
        if begun and isinstance(response, BytesResponse):  # a retry gets an earlier stream, without its start
            yield b"".join(split_events(response.body)[begun:])
            return
        async for block in response.chunks():
            yield block

    async def read(self) -> bytes:
        """All events."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def aclose(self) -> None:
        """End the turn if it is not served yet; close its response."""
        await end(self._turn)


async def end(turn: "asyncio.Task[Response]") -> None:
    """Cancel a turn that is not served yet, and close its response otherwise."""
    turn.cancel()
    await asyncio.wait([turn])
    if not turn.cancelled() and turn.exception() is None:
        await turn.result().aclose()
