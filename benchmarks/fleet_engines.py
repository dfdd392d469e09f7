"""A fleet of fake vLLM engines in one process, each with its own port, cache and speed.

`python -m benchmarks.fleet_engines --model FOLDER` prints the ports. An engine speaks what the proxy and
vllm-router need of stock vLLM; `fleet_model` decides when a request ends, `GET /totals` returns what it did.
"""

import argparse
import asyncio
import random
import re
from array import array
from collections.abc import Hashable
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import msgspec
import uvloop

from benchmarks.cases import CHAT, http_response
from benchmarks.fleet_model import BLOCK_IDS, EngineModel, Job, Speed
from benchmarks.fleet_speeds import FAST, REPLICAS, SLOW, fleet_speeds
from benchmarks.fleet_words import Message, Words
from tokenization import ChatTokenizer

MODEL = "fleet"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_BLOCK_BYTES = BLOCK_IDS * array("i").itemsize
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_MAX_MODEL_LEN = 1_000_000


class _Transfer(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _ChatBody(msgspec.Struct):
    """The fields of a chat request that this engine reads."""

    messages: list[Message] = []
    kv_transfer_params: _Transfer | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None

    @property
    def limit(self) -> int:
        """Ids to sample."""
        return self.max_tokens or self.max_completion_tokens or 16


class Engine:
    """One engine: its model and the requests that run on it."""

    def __init__(self, speed: Speed, words: Words, tokenizer: ChatTokenizer, seed: int) -> None:
        self.model = EngineModel(speed)
        self._words, self._random = words, random.Random(seed)
        self._tokenizer = tokenizer
        """Renders what the proxy asks for once; `words` renders the conversations."""
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._responses: dict[Job, tuple[asyncio.Transport, list[bytes]]] = {}
        self._logprobs = [_logprob_of(string) for string in words.strings]
        self._decoder = msgspec.json.Decoder(_ChatBody)
        self._encoder = msgspec.json.Encoder()
        self._count = 0

    def respond(self, transport: asyncio.Transport, path: str, body: bytes) -> None:
        """Answer a request now, or when the model is done with it."""
        if path == CHAT:
            self._chat(transport, body)
        elif path == "/tokenize":
            transport.write(http_response(self._tokenize(body)))
        else:
            transport.write(self._canned(path))

    def _chat(self, transport: asyncio.Transport, body: bytes) -> None:
        request = self._decoder.decode(body)
        transfer = request.kv_transfer_params
        given = transfer.prompt_token_ids if transfer is not None else None
        prompt = self._words.render(request.messages) if given is None else array("i", given)
        text, sampled = self._words.sample(self._random, request.limit)
        parts = self._completion(request, prompt, text, sampled)
        if request.limit == 1:  # discovery: it must not wait for the model
            transport.write(_joined(parts, 0))
            return
        blocks = _block_keys((prompt + sampled).tobytes())
        job = Job(blocks, len(prompt), len(sampled))
        self._responses[job] = (transport, parts)
        self._advance()
        self.model.submit(self._now(), job)
        self._schedule()

    def _completion(
        self, request: _ChatBody, prompt: "array[int]", text: str, sampled: "array[int]"
    ) -> list[bytes]:
        """The response's JSON before and after the number of cached ids."""
        self._count += 1
        name = f"{self._random.getrandbits(64):016x}"
        call = {"id": f"call_{name}", "type": "function", "function": {"name": "run", "arguments": "{}"}}
        ids = bool(request.return_token_ids)
        logprobs = b",".join(map(self._logprobs.__getitem__, sampled))
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "tool_calls": [call]},
            "logprobs": {"content": msgspec.Raw(b"[" + logprobs + b"]")} if request.logprobs else None,
            "finish_reason": "tool_calls",
            "stop_reason": None,
            "token_ids": list(sampled) if ids else None,
        }
        head = {
            "id": f"chatcmpl-{name}",
            "object": "chat.completion",
            "created": 1763683200,
            "model": MODEL,
            "choices": [choice],
            "prompt_token_ids": list(prompt) if ids else None,
        }
        usage = b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,' % (
            len(prompt),
            len(sampled),
            len(prompt) + len(sampled),
        )
        return [
            self._encoder.encode(head)[:-1] + usage + b'"prompt_tokens_details":{"cached_tokens":',
            b"}}}",
        ]

    def _advance(self) -> None:
        for job in self.model.advance(self._now()):
            transport, parts = self._responses.pop(job)
            if not transport.is_closing():
                transport.write(_joined(parts, job.cached_ids))

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        change = self.model.next_change()
        self._timer = None
        if change is not None:
            self._timer = self._loop.call_at(self._started + change, self._changed)

    def _changed(self) -> None:
        self._advance()
        self._schedule()

    def _now(self) -> float:
        return self._loop.time() - self._started

    def _tokenize(self, body: bytes) -> dict[str, Any]:
        request = msgspec.json.decode(body)
        ids = self._tokenizer.render(request["messages"], tools=request.get("tools"))
        return {"count": len(ids), "max_model_len": _MAX_MODEL_LEN, "tokens": ids}

    def _canned(self, path: str) -> bytes:
        if path == "/health":
            return http_response({})
        if path == "/version":
            return http_response({"version": "0.0.0+fleet"})
        if path == "/v1/models":
            model = {
                "id": MODEL,
                "object": "model",
                "root": self._tokenizer.source,
                "max_model_len": _MAX_MODEL_LEN,
            }
            return http_response({"object": "list", "data": [model]})
        if path == "/totals":
            return http_response(asdict(self.model.totals))
        return http_response({"detail": "Not Found"}, "404 Not Found")


class Connection(asyncio.Protocol):
    """One connection. Requests must have a `content-length`, and must not be pipelined."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parts: list[bytes] = []
        self._path = ""
        self._missing = -1
        """Bytes of the body that have not arrived; negative before its head is complete."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from it

    def data_received(self, data: bytes) -> None:
        """Collect a request; when it is complete, hand it to the engine."""
        self._parts.append(data)
        if self._missing < 0:
            head, separator, body = b"".join(self._parts).partition(b"\r\n\r\n")
            if not separator:
                return
            length = _LENGTH.search(head + b"\r\n")
            self._path = head.split(b" ", 2)[1].decode().partition("?")[0]
            self._parts, self._missing = [body], (int(length[1]) if length else 0) - len(body)
        else:
            self._missing -= len(data)
        if self._missing <= 0:
            body, self._parts, self._missing = b"".join(self._parts), [], -1
            self._engine.respond(self._transport, self._path, body)


def _block_keys(packed: bytes) -> list[Hashable]:
    """A key for each full block of ids, which also depends on all ids before it."""
    keys: list[Hashable] = []
    key = 0
    for start in range(0, len(packed) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        key = hash((key, packed[start : start + _BLOCK_BYTES]))
        keys.append(key)
    return keys


def _joined(parts: list[bytes], cached_ids: int) -> bytes:
    body = (b"%d" % cached_ids).join(parts)
    return _HEAD % len(body) + body


def _logprob_of(string: str) -> bytes:
    entry = {"token": string, "logprob": -0.12345678, "bytes": list(string.encode()), "top_logprobs": []}
    return msgspec.json.encode(entry)


async def _serve(speeds: list[Speed], root: str) -> None:
    loop, words, tokenizer = asyncio.get_running_loop(), Words(), ChatTokenizer.load(root)
    servers = []
    for number, speed in enumerate(speeds):
        engine = Engine(speed, words, tokenizer, number)
        servers.append(await loop.create_server(partial(Connection, engine), "127.0.0.1", 0, backlog=1024))
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main() -> None:
    """Run the command until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, metavar="FOLDER", help="folder of the tokenizer")
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    parser.add_argument("--slow", type=int, default=SLOW)
    parser.add_argument("--faster", type=float, default=1.0, help="run all engines this many times as fast")
    options = parser.parse_args()
    speeds = fleet_speeds(FAST.slower(1 / options.faster), options.replicas, options.slow)
    uvloop.run(_serve(speeds, options.model))


if __name__ == "__main__":
    main()
