"""An engine that does nothing, as cheaply as Python can: `python -m benchmarks.noop`.

It prints its port. A request with the header `x-response` gets the canned response of that name. A request
without it is part of the proxy's discovery, and gets the response of a vLLM that accepts ids. With
`--turns` the engine also holds conversations (`benchmarks.turns`): `x-response: turn`, or `first` to render
the prompt from messages.
"""

import argparse
import asyncio
import json
import re
from typing import Any, cast

import uvloop

from benchmarks.cases import CHAT, MODEL, PACE_S, http_response, responses, stream
from benchmarks.turns import Turns
from tokenization import ChatTokenizer

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_RESPONSE_NAME = re.compile(rb"\r\nx-response: *(\w+)", re.IGNORECASE)
_EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class NoOpEngine(asyncio.Protocol):
    """One connection. Requests must have a `content-length`, and must not be pipelined."""

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
        self._response_name: str | None = None
        self._body: list[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from it

    def data_received(self, data: bytes) -> None:
        """Skip bodies by their length, so that 100k ids cost no CPU here; keep only those that are parsed."""
        if not self._missing:
            self._head += data
            end = self._head.find(b"\r\n\r\n") + 4
            if end < 4:
                return
            head, data = self._head[:end], self._head[end:]
            self._begin(head)
        self._missing -= len(data)
        if self._body is not None:
            self._body.append(data)
        if self._missing <= 0:
            self._finish()

    def _begin(self, head: bytes) -> None:
        self._head = head
        length = _LENGTH.search(head)
        self._missing = int(length[1]) if length else 0
        name = _RESPONSE_NAME.search(head)
        self._response_name = name[1].decode() if name else None
        self._body = [] if self._response_name in (None, "turn", "first") else None

    def _finish(self) -> None:
        head, body = self._head, b"".join(self._body or ())
        self._head, self._body, self._missing = b"", None, 0
        if self._response_name is None:
            self._transport.write(self._discovery_response(head.split(b" ", 2)[1].decode(), body))
        elif self._turns is not None and self._response_name in ("turn", "first"):
            self._transport.write(self._turns.respond(body, render=self._response_name == "first"))
        elif self._response_name == "stream":
            self._write_next(0, 0.0)
        elif self._response_name == "paced":
            self._write_next(0, PACE_S)
        else:
            self._transport.write(self._canned[self._response_name])

    def _write_next(self, number: int, pause_s: float) -> None:
        """Write one chunk per iteration of the event loop, so that each is a packet, as from an engine."""
        if self._transport.is_closing():
            return
        self._transport.write(self._chunks[number])
        if number + 1 == len(self._chunks):
            return
        if pause_s:
            self._loop.call_later(pause_s, self._write_next, number + 1, pause_s)
        else:
            self._loop.call_soon(self._write_next, number + 1, pause_s)

    def _discovery_response(self, path: str, body: bytes) -> bytes:
        if path == "/health":
            return _EMPTY
        if path == "/version":
            return http_response({"version": "0.0.0+noop"})
        if path == "/v1/models":
            models = [{"id": MODEL, "object": "model", "root": self._model}] if self._model else []
            return http_response({"object": "list", "data": models})
        if path == CHAT:
            return http_response(_probe(json.loads(body)))
        if path == "/tokenize" and self._turns is not None:
            return http_response(self._turns.tokenize(json.loads(body)))
        if path == "/tokenize":
            return http_response({"tokens": [0] * len(json.loads(body).get("messages", []))})
        return http_response({"detail": "Not Found"}, "404 Not Found")


def _probe(request: dict[str, Any]) -> dict[str, Any]:
    """The response to a discovery request: the given ids as the prompt, so that the proxy sends ids."""
    transfer = request.get("kv_transfer_params") or {}
    return {"prompt_token_ids": transfer.get("prompt_token_ids"), "choices": []}


async def _serve(model: str | None, turns: Turns | None) -> None:
    canned, chunks = responses(), stream()
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
    turns = Turns(ChatTokenizer.load(options.model)) if options.turns else None
    uvloop.run(_serve(options.model, turns))
