"""The engine of `gateway.py`: fixed bytes, as fast as Python can. `python -m benchmarks.gateway_engine FILE`.

It prints its port. FILE holds the `Answer` of each column (`benchmarks.gateway_answers`); `GET /use/COLUMN`
selects the one that all chat requests get from then on. A request is not parsed: it is searched for the
fields that decide on the evidence in the response, as vLLM's would be:

- `return_token_ids`: the prompt's ids and the sampled ids
- `logprobs`: a log-probability for each sampled id
- `kv_transfer_params.prompt_token_ids`: the prompt's ids are those of the request
- `stream`: server-sent events, one for each sampled id; `continuous_usage_stats` puts usage into each

Everything else is what gateways ask a vLLM when they start.
"""

import argparse
import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import uvloop

from benchmarks.cases import http_response
from benchmarks.gateway_answers import MODEL, Answer, CannedAnswer
from tokenization import ChatTokenizer

Connections = Callable[[], asyncio.Protocol]
"""Makes the protocol of each connection."""
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_SENT_IDS = b'"prompt_token_ids":'
_MAX_MODEL_LEN = 1_000_000


class Engine:
    """The answers, and which of them is in use."""

    def __init__(self, answers: dict[str, Answer], root: str) -> None:
        """`root`: folder of the tokenizer, which `/v1/models` names as the model that was loaded."""
        self._tokenizer = ChatTokenizer.load(root)
        self._answers = {name: CannedAnswer(answer) for name, answer in answers.items()}
        self._current = next(iter(self._answers.values()))
        model = {"id": MODEL, "object": "model", "owned_by": "vllm", "root": root, "parent": None}
        listed = {"object": "list", "data": [{**model, "max_model_len": _MAX_MODEL_LEN}]}
        self._pages = {
            "/health": http_response({}),
            "/version": http_response({"version": "0.32.0"}),
            "/v1/models": http_response(listed),
        }

    def answer(self, body: bytes) -> list[bytes]:
        """The response to a chat request: its parts, each to be written by itself."""
        ids, logprobs = _is_true(body, b'"return_token_ids":'), _is_true(body, b'"logprobs":')
        sent = b""
        if ids and (at := body.find(_SENT_IDS)) >= 0:
            start = body.index(b"[", at)
            sent = body[start : body.index(b"]", start) + 1]
        if not _is_true(body, b'"stream":'):
            return [self._current.whole(ids, logprobs, sent)]
        return self._current.stream(ids, logprobs, _is_true(body, b'"continuous_usage_stats":'), sent)

    def page(self, path: str, body: bytes) -> bytes:
        """The response to a request for anything else."""
        if path == "/tokenize":
            request = msgspec.json.decode(body)
            ids = self._tokenizer.render(request["messages"], tools=request.get("tools"))
            return http_response({"count": len(ids), "max_model_len": _MAX_MODEL_LEN, "tokens": ids})
        command, _, name = path.removeprefix("/").partition("/")
        if command == "use" and name in self._answers:
            self._current = self._answers[name]
            return http_response({"in use": name})
        return self._pages.get(path) or http_response({"detail": "Not Found"}, "404 Not Found")


class Connection(asyncio.Protocol):
    """One connection. Requests must have a `content-length`, and must not be pipelined."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._head = b""
        self._missing = 0
        """Bytes of the body that have not arrived."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from it

    def data_received(self, data: bytes) -> None:
        """Collect a request; answer it when it is complete."""
        if not self._missing:
            data = self._head + data
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                self._head = data
                return
            self._head, data = data[:end], data[end:]
            length = _LENGTH.search(self._head)
            self._missing = int(length[1]) if length else 0
        self._missing -= len(data)
        self._parts.append(data)
        if self._missing <= 0:
            body = data if len(self._parts) == 1 else b"".join(self._parts)
            head, self._head, self._parts, self._missing = self._head, b"", [], 0
            self._respond(head, body)

    def _respond(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"POST /v1/chat/completions "):
            self._write(self._engine.answer(body), 0)
        else:
            path = head.split(b" ", 2)[1].decode().partition("?")[0]
            self._transport.write(self._engine.page(path, body))

    def _write(self, parts: list[bytes], number: int) -> None:
        """Write one part per iteration of the event loop, so that each is a packet, as from an engine."""
        if self._transport.is_closing():
            return
        self._transport.write(parts[number])
        if number + 1 < len(parts):
            self._loop.call_soon(self._write, parts, number + 1)


def _is_true(body: bytes, name: bytes) -> bool:
    """Whether a field is true. Its name with quotes and colon occurs in no JSON string."""
    at = body.find(name)
    return at >= 0 and body.startswith((b"true", b" true"), at + len(name))


def run(description: str | None, connections: Callable[[dict[str, Answer], str], Connections]) -> None:
    """Serve on a free port until the process is ended: the whole command of a module with an engine.

    Args:
        connections: makes the engine of answers and of the folder of a tokenizer, and returns what makes its
            connections.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("answers", type=Path, metavar="FILE")
    parser.add_argument("--model", required=True, metavar="FOLDER", help="folder of the tokenizer")
    options = parser.parse_args()
    answers = msgspec.msgpack.decode(options.answers.read_bytes(), type=dict[str, Answer])
    uvloop.run(_serve(connections(answers, options.model)))


async def _serve(connect: Connections) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(connect, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def _connections(answers: dict[str, Answer], root: str) -> Connections:
    engine = Engine(answers, root)
    return lambda: Connection(engine)


if __name__ == "__main__":
    run(__doc__, _connections)
