"""Sends a response to a client: whole, in pieces while it is read, or as a stream that is kept alive."""

import asyncio
import logging
import time
from contextlib import ExitStack
from io import BytesIO
from tempfile import TemporaryFile
from typing import BinaryIO

from tokenproxy.base.http import BytesResponse, Response, is_event_stream
from tokenproxy.base.types import Message, Send
from tokenproxy.formats.translated import TranslatedStream

log = logging.getLogger("tokenproxy")

PIECE_BYTES = 256 * 1024
"""The most bytes of a response that is in memory which are sent at once."""
UNREAD_S = 0.05
"""How long a client may take for a piece until the rest waits in a file."""


async def send_response(response: Response, send: Send) -> None:
    """Send a response. Of a stream the head is sent at once, of another body with its first bytes: if the
    engine breaks before them, the client gets an error object."""
    head = {"type": "http.response.start", "status": response.status, "headers": response.headers}
    if isinstance(response, BytesResponse):
        await send(head)
        if len(response.body) <= PIECE_BYTES:
            await send({"type": "http.response.body", "body": response.body})
        else:
            await _send_body(response, send)
        return
    streams = is_event_stream(response.headers)
    if streams:
        await send(head)
    alive = _KeepingAlive(send, response) if isinstance(response, TranslatedStream) else None
    send_chunk, started = alive.send if alive is not None else send, streams
    try:
        async for chunk in response.chunks():
            if not started:
                await send(head)
                started = True
            await send_chunk({"type": "http.response.body", "body": chunk, "more_body": True})
    finally:
        if alive is not None:
            alive.close()
    if not started:
        await send(head)
    await send({"type": "http.response.body", "body": b""})


async def _send_body(response: BytesResponse, send: Send) -> None:
    """Send a body in pieces. While the client does not read, what is left of it waits in a file that has no
    name, not in memory."""
    body, response.body, sent = response.body, b"", 0  # the response would keep it in memory
    size = len(body)
    file: BinaryIO | None = None
    with ExitStack() as stack:
        while sent < size:
            if file is None:
                piece = body[sent : sent + PIECE_BYTES]
            else:
                piece = await asyncio.to_thread(file.read, PIECE_BYTES)
            sent += len(piece)
            message = {"type": "http.response.body", "body": piece, "more_body": sent < size}
            sending = asyncio.ensure_future(_sent(send, message))
            try:
                if file is None and sent < size and not (await asyncio.wait({sending}, timeout=UNREAD_S))[0]:
                    file = stack.enter_context(await asyncio.to_thread(_waiting_file, body, sent))
                    body = b""
                await sending
            finally:
                sending.cancel()


async def _sent(send: Send, message: Message) -> None:
    await send(message)


def _waiting_file(body: bytes, start: int) -> BinaryIO:
    """A file with a body from `start` on; one in memory where no file can be written."""
    rest, written = memoryview(body)[start:], 0
    with ExitStack() as stack:
        try:
            file: BinaryIO = stack.enter_context(TemporaryFile(buffering=0))
            while written < len(rest):
                written += file.write(rest[written:])
            file.seek(0)
        except OSError as error:
            log.warning("a response that its client does not read stays in memory: %s", str(error))
            return BytesIO(rest)
        stack.pop_all()
        return file


class _KeepingAlive:
    """Sends an event whenever a stream was silent for a while. A silent stream costs one timer, no task."""

    def __init__(self, send: Send, stream: TranslatedStream) -> None:
        self._send = send
        self._message = {"type": "http.response.body", "body": stream.keep_alive, "more_body": True}
        self._silence_s = stream.silence_s
        self._sent = time.monotonic()
        self._sending = False
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._silence_s, self._check)

    async def send(self, message: Message) -> None:
        """Send what the stream itself sends."""
        self._sending = True
        await self._send(message)
        self._sending = False
        self._sent = time.monotonic()

    def close(self) -> None:
        """Send nothing more."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _check(self) -> None:
        left = self._sent + self._silence_s - time.monotonic()
        if left <= 0:
            # a client that does not read gets nothing more
            if not self._sending and (self._task is None or self._task.done()):
                self._task = self._loop.create_task(self._keep_alive())
            left = self._silence_s
        self._timer = self._loop.call_later(left, self._check)

    async def _keep_alive(self) -> None:
        await self._send(self._message)
        self._sent = time.monotonic()
