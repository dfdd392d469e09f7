"""Responses in another wire format than the engine's: translated from a chat completion or its chunks."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec

from proxy.dialects.chat_parts import Chat, ErrorPart, decode_chat
from proxy.engine.sse import event_data, split_events
from proxy.errors import ApiError, EngineBroken
from proxy.history.echo import Signer, TurnTokens
from proxy.http import JSON_HEADERS, BytesResponse, KeptAlive, Response, is_event_stream
from proxy.types import Headers

_DONE = b"[DONE]"
_EVENTS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Translation(ABC):
    """Writes one response in a wire format. It reads either one completion, or chunks and then their end."""

    keep_alive = b": keep-alive\n\n"
    """The event that is sent while the engine is silent."""

    turn_id = ""
    """The id of the turn, set before anything is read; empty for a turn that is not recorded."""
    signer: Signer | None = None
    """Makes the tokens that clients send back; None while the store does not respond."""
    tenant = ""
    """The tenant whose request is answered."""

    @property
    def tokens(self) -> TurnTokens | None:
        """Makes the tokens of the turn; None for a turn that is not recorded."""
        return TurnTokens(self.signer, self.tenant, self.turn_id) if self.signer and self.turn_id else None

    @abstractmethod
    def whole(self, completion: Chat) -> bytes:
        """The body for a whole completion."""

    @abstractmethod
    def begin(self) -> bytes:
        """The events with which a stream begins, although nothing was read yet."""

    @abstractmethod
    def chunk(self, chunk: Chat) -> bytes:
        """The events for the next chunk; those with which a stream begins first, if they were not sent."""

    @abstractmethod
    def end(self) -> bytes:
        """The events after the last chunk."""

    @abstractmethod
    def error(self, status: int, message: str, code: str | None) -> bytes:
        """The body of a response for an error of the engine."""

    @abstractmethod
    def error_event(self, status: int, message: str, code: str | None) -> bytes:
        """The last event of a stream for an error of the engine that came after the stream began."""

    def in_stream(self, status: int, message: str, code: str | None) -> bool:
        """Whether an error is sent as a stream, although no stream began."""
        return False

    def broken(self, error: ApiError) -> bytes:
        """The events of a stream that cannot be completed, before the error event that every route has."""
        return b""

    async def settle(self) -> None:  # noqa: B027 - most formats have nothing to do
        """Do what must be done before the client gets the end of the response, such as to store it."""


async def translate(response: Response, translation: Translation, silence_s: float) -> Response:
    """The response in the wire format of a translation.

    Args:
        silence_s: after so many seconds of silence, a stream gets an event that keeps it alive.

    Raises:
        EngineBroken: the engine's response is no chat completion.
    """
    translation.turn_id = _turn_id(response.headers)
    if response.status < 400 and is_event_stream(response.headers):
        return TranslatedStream(response, translation, silence_s)
    try:
        body = await response.read()
    finally:
        await response.aclose()
    headers = [*_kept(response.headers), *JSON_HEADERS]
    if response.status >= 400:
        problem = (response.status, *problem_of(body))
        if translation.in_stream(*problem):
            return BytesResponse(200, list(_EVENTS), translation.error_event(*problem))
        return BytesResponse(response.status, headers, translation.error(*problem))
    whole = translation.whole(_chat(body))
    await translation.settle()
    return BytesResponse(response.status, headers, whole)


class TranslatedStream(KeptAlive):
    """A stream of chunks in another wire format. What arrived together is sent together."""

    def __init__(self, response: Response, translation: Translation, silence_s: float) -> None:
        self.status = response.status
        self.headers = [*_kept(response.headers), *_EVENTS]
        self.keep_alive = translation.keep_alive
        self.silence_s = silence_s
        self._response = response
        self._translation = translation

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events, in blocks of whole events.

        Raises:
            EngineBroken: the engine's stream breaks, or an event is no chunk.
        """
        try:
            async for block in translated(self._response, self._translation):
                yield block
        except ApiError as error:
            yield self._translation.broken(error)
            raise

    async def read(self) -> bytes:
        """All events."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def aclose(self) -> None:
        """Close the response that is translated."""
        await self._response.aclose()


async def translated(response: Response, translation: Translation) -> AsyncIterator[bytes]:
    """The events of a stream of chunks in another format. Raises EngineBroken."""
    async for block in response.chunks():
        ready: list[bytes] = []
        for event in split_events(block):
            data = event_data(event)
            if data == _DONE:
                if sent := b"".join(ready):
                    yield sent
                ready = [translation.end()]
                await translation.settle()
            elif data is not None:
                chunk = _chat(data)
                if chunk.error is not None:
                    ready.append(_error_event(chunk.error, translation))
                    yield b"".join(ready)
                    return
                ready.append(translation.chunk(chunk))
        if sent := b"".join(ready):
            yield sent


def _error_event(error: ErrorPart, translation: Translation) -> bytes:
    """The event for an error of the engine in the middle of a stream."""
    status = error.code if isinstance(error.code, int) and 400 <= error.code < 600 else 500
    return translation.error_event(status, error.message, error.code if isinstance(error.code, str) else None)


class EarlyStream(KeptAlive):
    """A stream that begins before the engine responds, because that takes long: clients give up in silence.

    Its status and headers are sent already, so an error of the engine is its last event.
    """

    status = 200

    def __init__(self, turn: "asyncio.Task[Response]", translation: Translation, silence_s: float) -> None:
        self.headers: Headers = list(_EVENTS)
        self.keep_alive = translation.keep_alive
        self.silence_s = silence_s
        self._turn = turn
        self._translation = translation

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events, in blocks of whole events. Raises ApiError."""
        yield self._translation.begin()
        try:
            response = await asyncio.shield(self._turn)
            self._translation.turn_id = _turn_id(response.headers)
            if response.status >= 400:
                yield self._translation.error_event(response.status, *problem_of(await response.read()))
                return
            async for block in translated(response, self._translation):
                yield block
        except ApiError as error:
            yield self._translation.broken(error)
            raise

    async def read(self) -> bytes:
        """All events."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def aclose(self) -> None:
        """End the turn if it is not served yet; close its response."""
        await end(self._turn)


async def serve_early(
    serve: Callable[[], Coroutine[Any, Any, Response]], translation: Translation, silence_s: float
) -> Response:
    """The translated response to a streamed turn; after `silence_s` seconds one that begins before the turn.

    Raises:
        ApiError: the turn cannot be served.
    """
    turn = asyncio.create_task(serve())
    try:
        await asyncio.wait([turn], timeout=silence_s)
        if turn.done():
            return await translate(turn.result(), translation, silence_s)
    except ApiError as error:
        problem = (error.status, error.message, error.code)
        if translation.in_stream(*problem):
            return BytesResponse(200, list(_EVENTS), translation.error_event(*problem))
        await end(turn)
        raise
    except BaseException:  # cancellation too: the engine must stop generating
        await end(turn)
        raise
    return EarlyStream(turn, translation, silence_s)


async def end(turn: "asyncio.Task[Response]") -> None:
    """Cancel a turn that is not served yet, and close its response otherwise."""
    turn.cancel()
    await asyncio.wait([turn])
    if not turn.cancelled() and turn.exception() is None:
        await turn.result().aclose()


def _chat(data: bytes) -> Chat:
    try:
        return decode_chat(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EngineBroken("the engine's response is not a chat completion") from error


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


def problem_of(body: bytes) -> tuple[str, str | None]:
    """The message and the code of an engine's error."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return body.decode(errors="replace") or "the engine returned an error without a message", None
    return error.message, error.code if isinstance(error.code, str) else None


def _turn_id(headers: Headers) -> str:
    return next((value.decode() for name, value in headers if name == b"x-turn-id"), "")


def _kept(headers: Headers) -> Headers:
    """The headers that describe more than the body."""
    own = (b"content-type", b"content-length", b"cache-control", b"transfer-encoding", b"content-encoding")
    return [pair for pair in headers if pair[0] not in own]
