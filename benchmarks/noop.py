"""An engine that does nothing, as cheaply as Python can: `python -m benchmarks.noop`.

It prints its port. A request with the header `x-answer` gets that canned answer, whatever it holds; one
without is the proxy asking what this engine can do, and gets what a stock vLLM would say. With `--turns` it
also holds conversations (`benchmarks.turns`): `x-answer: turn`, or `first` to render a prompt of messages.
"""

import argparse
import asyncio
import json
import re
from typing import Any, cast

import uvloop

from benchmarks.cases import CHAT, MODEL, PACE_S, answer, answers, stream
from benchmarks.turns import Turns
from tokenization import ChatTokenizer

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_WANTED = re.compile(rb"\r\nx-answer: *(\w+)", re.IGNORECASE)
_EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class NoOpEngine(asyncio.Protocol):
    """One connection. Requests must announce their length, and must not be pipelined."""

    def __init__(
        self, canned: dict[str, bytes], chunks: list[bytes], model: str | None, turns: Turns | None
    ) -> None:
        self._turns = turns
        self._canned = canned
        self._chunks = chunks
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._head = b""
        self._missing = 0
        self._wanted: str | None = None
        self._asked: list[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from it

    def data_received(self, data: bytes) -> None:
        """Count bodies, so that 100k ids cost nothing here; keep only those that are looked at."""
        if not self._missing:
            self._head += data
            end = self._head.find(b"\r\n\r\n") + 4
            if end < 4:
                return
            head, data = self._head[:end], self._head[end:]
            self._begin(head)
        self._missing -= len(data)
        if self._asked is not None:
            self._asked.append(data)
        if self._missing <= 0:
            self._finish()

    def _begin(self, head: bytes) -> None:
        self._head = head
        length = _LENGTH.search(head)
        self._missing = int(length[1]) if length else 0
        wanted = _WANTED.search(head)
        self._wanted = wanted[1].decode() if wanted else None
        self._asked = [] if self._wanted in (None, "turn", "first") else None

    def _finish(self) -> None:
        head, asked = self._head, b"".join(self._asked or ())
        self._head, self._asked, self._missing = b"", None, 0
        if self._wanted is None:
            self._transport.write(self._question(head.split(b" ", 2)[1].decode(), asked))
        elif self._turns is not None and self._wanted in ("turn", "first"):
            self._transport.write(self._turns.answer(asked, render=self._wanted == "first"))
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
        if path == "/tokenize" and self._turns is not None:
            return answer(self._turns.tokenize(json.loads(body)))
        if path == "/tokenize":
            return answer({"tokens": [0] * len(json.loads(body).get("messages", []))})
        return answer({"detail": "Not Found"}, "404 Not Found")


def _probe(request: dict[str, Any]) -> dict[str, Any]:
    """What says that this engine takes exact prompts: their echo."""
    given = request.get("kv_transfer_params") or {}
    return {"prompt_token_ids": given.get("prompt_token_ids"), "choices": []}


async def _serve(model: str | None, turns: Turns | None) -> None:
    canned, chunks = answers(), stream()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: NoOpEngine(canned, chunks, model, turns), "127.0.0.1", 0, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", metavar="FOLDER", help="folder of the model's tokenizer (default: serves none)"
    )
    parser.add_argument("--turns", action="store_true", help="hold conversations with that tokenizer")
    options = parser.parse_args()
    holding = Turns(ChatTokenizer.load(options.model)) if options.turns else None
    uvloop.run(_serve(options.model, holding))
