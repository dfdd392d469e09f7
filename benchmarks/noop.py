"""An engine that does nothing, as cheaply as Python can: `python -m benchmarks.noop`.

It prints its port. A request with the header `x-answer` gets that canned answer, whatever it holds; one
without is the proxy asking what this engine can do, and gets what a stock vLLM would say.
"""

import argparse
import asyncio
import json
import re
from typing import Any, cast

import uvloop

from benchmarks.cases import CHAT, MODEL, PACE_S, answer, answers, stream

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_WANTED = re.compile(rb"\r\nx-answer: *(\w+)", re.IGNORECASE)
_EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class NoOpEngine(asyncio.Protocol):
    """One connection. Requests must announce their length, and must not be pipelined."""

    def __init__(self, canned: dict[str, bytes], chunks: list[bytes], model: str | None) -> None:
        self._canned = canned
        self._chunks = chunks
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._head = b""
        self._missing = 0
        self._wanted: str | None = None
        self._asked = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from it

    def data_received(self, data: bytes) -> None:
        """Count bodies, so that 100k ids cost nothing here; keep only those of the proxy's own questions."""
        if not self._missing:
            self._head += data
            end = self._head.find(b"\r\n\r\n") + 4
            if end < 4:
                return
            head, data = self._head[:end], self._head[end:]
            self._begin(head)
        self._missing -= len(data)
        if self._wanted is None:
            self._asked += data
        if self._missing <= 0:
            self._finish()

    def _begin(self, head: bytes) -> None:
        self._head = head
        length = _LENGTH.search(head)
        self._missing = int(length[1]) if length else 0
        wanted = _WANTED.search(head)
        self._wanted = wanted[1].decode() if wanted else None

    def _finish(self) -> None:
        head, asked = self._head, self._asked
        self._head, self._asked, self._missing = b"", b"", 0
        if self._wanted is None:
            self._transport.write(self._question(head.split(b" ", 2)[1].decode(), asked))
        elif self._wanted == "stream":
            self._write_next(0, 0.0)
        elif self._wanted == "paced":
            self._write_next(0, PACE_S)
        else:
            self._transport.write(self._canned[self._wanted])

    def _write_next(self, number: int, pause_s: float) -> None:
        """One chunk for each turn of the event loop: each is a packet of its own, as from an engine."""
        if self._transport.is_closing():
            return
        self._transport.write(self._chunks[number])
        if number + 1 == len(self._chunks):
            return
        if pause_s:
            self._loop.call_later(pause_s, self._write_next, number + 1, pause_s)
        else:
            self._loop.call_soon(self._write_next, number + 1, pause_s)

    def _question(self, path: str, body: bytes) -> bytes:
        if path == "/health":
            return _EMPTY
        if path == "/version":
            return answer({"version": "0.0.0+noop"})
        if path == "/v1/models":
            models = [{"id": MODEL, "object": "model", "root": self._model}] if self._model else []
            return answer({"object": "list", "data": models})
        if path == CHAT:
            return answer(_probe(json.loads(body)))
        if path == "/tokenize":
            return answer({"tokens": [0] * len(json.loads(body).get("messages", []))})
        return answer({"detail": "Not Found"}, "404 Not Found")


def _probe(request: dict[str, Any]) -> dict[str, Any]:
    """What says that this engine takes exact prompts: their echo."""
    given = request.get("kv_transfer_params") or {}
    return {"prompt_token_ids": given.get("prompt_token_ids"), "choices": []}


async def _serve(model: str | None) -> None:
    canned, chunks = answers(), stream()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: NoOpEngine(canned, chunks, model), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", metavar="FOLDER", help="folder of the model's tokenizer (default: serves none)"
    )
    uvloop.run(_serve(parser.parse_args().model))
