"""Sends responses and errors over ASGI."""

import asyncio
import logging
from time import monotonic

from tokenproxy.base.error_formats import error_event, send_error
from tokenproxy.base.errors import ApiError, EngineBroken, Stopping
from tokenproxy.base.http import BytesResponse, Response
from tokenproxy.base.types import Message, Send
from tokenproxy.engine.sse import whole_events
from tokenproxy.formats.translated import TranslatedStream
from tokenproxy.turn.services import RunningRequests

log = logging.getLogger("tokenproxy")


async def send_events(response: Response, path: str, send: Send, running: RunningRequests) -> None:
    """Send a stream of events; a stream that breaks or is cut off ends with an error event."""
    started = False
    alive: _KeepingAlive | None = None
    try:
        with running.cuttable():
            await send(_head(response))
            started = True
            if isinstance(response, TranslatedStream):
                alive = _KeepingAlive(send, response)
                send = alive.send
            async for chunk in whole_events(response.chunks()):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except ApiError as error:
        if not started:
            await send_error(send, error, path)
            return
        log.warning("a stream of %s ends with an error: %s", path, error.message)
        await send({"type": "http.response.body", "body": error_event(path, error), "more_body": True})
    finally:
        if alive is not None:
            alive.close()
    await send({"type": "http.response.body", "body": b""})


async def send_body(response: Response, path: str, send: Send, running: RunningRequests) -> None:
    """Send a body that is not an event stream.

    The head is sent with the first bytes: if the engine breaks before them, the client gets an error object.
    """
    if isinstance(response, BytesResponse):
        await send(_head(response))
        await send({"type": "http.response.body", "body": response.body})
        return
    started = False
    try:
        with running.cuttable():
            async for chunk in response.chunks():
                if not started:
                    await send(_head(response))
                    started = True
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except (EngineBroken, Stopping) as error:
        # after the head the server cuts the connection: a short body must not look complete
        if not started:
            await send_error(send, error, path)
        elif not isinstance(error, Stopping):
            raise
        return
    if not started:
        await send(_head(response))
    await send({"type": "http.response.body", "body": b""})


def _head(response: Response) -> Message:
    return {"type": "http.response.start", "status": response.status, "headers": response.headers}


class _KeepingAlive:
    """Sends an event whenever a stream was silent for a while. A silent stream costs one timer, no task."""

    def __init__(self, send: Send, stream: TranslatedStream) -> None:
        self._send = send
        self._message = {"type": "http.response.body", "body": stream.keep_alive, "more_body": True}
        self._silence_s = stream.silence_s
        self._sent = monotonic()
        self._sending = False
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._silence_s, self._check)

    async def send(self, message: Message) -> None:
        """Send what the stream itself sends."""
        self._sending = True
        await self._send(message)
        self._sending = False
        self._sent = monotonic()

    def close(self) -> None:
        """Send nothing more."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _check(self) -> None:
        left = self._sent + self._silence_s - monotonic()
        if left <= 0:
            # a client that does not read gets nothing more
            if not self._sending and (self._task is None or self._task.done()):
                self._task = self._loop.create_task(self._keep_alive())
            left = self._silence_s
        self._timer = self._loop.call_later(left, self._check)

    async def _keep_alive(self) -> None:
        await self._send(self._message)
        self._sent = monotonic()
