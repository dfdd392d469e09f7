"""A client of raw bytes: what it sends need not be HTTP."""

import asyncio
import contextlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back until the server closed the connection."""

    data: bytes

    @property
    def statuses(self) -> list[int]:
        """The status of each response; interim ones (100) are left out."""
        lines = [part.partition(b"\r\n")[0] for part in (b"\r\n" + self.data).split(b"\r\nHTTP/1.1 ")[1:]]
        return [int(line[:3]) for line in lines if not line.startswith(b"1")]

    @property
    def body(self) -> bytes:
        """The body of the last response, without the framing of chunks."""
        head, _, body = self.data.rpartition(b"HTTP/1.1 ")[2].partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" not in head.lower():
            return body
        pieces = []
        while body:
            size, _, body = body.partition(b"\r\n")
            length = int(size, 16)
            pieces.append(body[:length])
            body = body[length + 2 :]
        return b"".join(pieces)


async def send(
    address: tuple[str, int],
    data: bytes,
    *,
    half_close: bool = False,
    patience_s: float = 60.0,
    connecting: asyncio.Semaphore | None = None,
) -> Answer:
    """Send bytes and read until the server closes.

    Args:
        half_close: end the own side after the last byte, for a server that would wait for more.
        connecting: how many may connect at once; what a server has not accepted yet is limited.
    """
    received = bytearray()
    async with asyncio.timeout(patience_s):
        async with connecting or contextlib.nullcontext():
            reader, writer = await asyncio.open_connection(*address)
        # a server may refuse what it does not want to read to its end
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            writer.write(data)
            if half_close:
                await writer.drain()
                writer.write_eof()
            while piece := await reader.read(65536):
                received += piece
    return Answer(bytes(received))
