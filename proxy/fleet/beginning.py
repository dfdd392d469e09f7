"""The beginning of an engine's answer, read before anything is sent to the client.

Until then the request can be sent to another replica. A stream has begun with its first event, a completion
that is no stream when it is there as a whole.
"""

import re
from collections.abc import AsyncIterator

import msgspec

from proxy.engine.sse import whole_events
from proxy.errors import EngineBroken
from proxy.http import BytesResponse, Response, is_event_stream
from proxy.types import Headers

_JSON = b"application/json"
_ERROR_EVENT = re.compile(rb'(?:event: ?error\r?\n)?data: ?(\{"error".*\})\r?\n\r?\n')


class _Error(msgspec.Struct):
    code: int | str | None = None


class _ErrorEvent(msgspec.Struct):
    error: _Error


async def read_beginning(response: Response, name: str, *, completion: bool) -> Response:
    """Read the beginning of a response; if that fails, the response is closed.

    Args:
        name: the replica's name, for errors.
        completion: whether it must be a chat completion or a stream of its chunks, unless it is an error.

    Raises:
        EngineBroken: the engine hangs up, or the response is something else.
        EngineTimeout: its body came too slowly.
    """
    try:
        return await _read(response, name, completion)
    except BaseException:  # cancellation too: the caller gets no response to close
        await response.aclose()
        raise


async def _read(response: Response, name: str, completion: bool) -> Response:
    if response.status < 400 and is_event_stream(response.headers):
        resumed = await _first_chunk(response, whole_events(response.chunks()))
        return await _without_error(resumed, name) if completion else resumed
    if not completion and response.status < 400:
        return await _first_chunk(response, response.chunks())
    body = await response.read()
    if completion and response.status < 400:
        kind = _content_type(response.headers)
        if not kind.startswith(_JSON) or not body.lstrip().startswith(b"{"):
            shown = kind.decode("latin-1") or "no content type"
            raise EngineBroken(f"{name} returned no chat completion but {len(body)} bytes of {shown}")
    await response.aclose()
    return BytesResponse(response.status, response.headers, body)


async def _first_chunk(response: Response, chunks: AsyncIterator[bytes]) -> "_Resumed":
    return _Resumed(response, await anext(chunks, None), chunks)


async def _without_error(resumed: "_Resumed", name: str) -> Response:
    """A stream as it is; one that begins with an error of the engine becomes that error, with its status.

    Raises:
        EngineBroken: the stream is empty.
    """
    if resumed.first is None:
        raise EngineBroken(f"{name} returned an empty stream")
    found = _ERROR_EVENT.match(resumed.first)
    if found is None:
        return resumed
    try:
        code = msgspec.json.decode(found[1], type=_ErrorEvent).error.code
    except (msgspec.DecodeError, UnicodeDecodeError):
        return resumed
    status = code if isinstance(code, int) and 400 <= code <= 599 else 500
    await resumed.aclose()
    return BytesResponse(status, [(b"content-type", _JSON)], found[1])


def _content_type(headers: Headers) -> bytes:
    return next((value for name, value in headers if name == b"content-type"), b"")


class _Resumed:
    """A response of which the first chunk was read."""

    def __init__(self, response: Response, first: bytes | None, rest: AsyncIterator[bytes]) -> None:
        self.status = response.status
        self.headers = response.headers
        self._response = response
        self.first = first
        self._rest = rest

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body's bytes, the first chunk first."""
        first, self.first = self.first, None
        if first is None:
            return
        yield first
        del first  # not held until the stream ends
        async for chunk in self._rest:
            yield chunk

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def aclose(self) -> None:
        """See `Response.aclose`."""
        await self._response.aclose()
