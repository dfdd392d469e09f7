"""The engine of all benchmarks, as fast as Python can: `python -m benchmarks.engine --model FOLDER`.

It prints its ports. With `--answers FILE` every chat request gets the canned answer that `GET /use/NAME`
selected, and a stream takes the time that `GET /service/SECONDS` set, 0 at first. Without it, an answer is
sampled for each request, and `engine_model` decides when it ends: a prefix cache, a queue, and a speed.
`GET /totals` returns what the engine did.

A request for a canned answer is not parsed: it is searched for the fields that decide what a response holds,
as vLLM's would:

- `return_token_ids`: the prompt's ids and the sampled ids
- `logprobs`: a log-probability for each sampled id
- `kv_transfer_params.prompt_token_ids`: the prompt's ids are those of the request
- `stream`: server-sent events, one for each sampled id; `continuous_usage_stats` puts usage into each

Everything else is what gateways ask a vLLM when they start.
"""

import argparse
import asyncio
import random
import re
from array import array
from collections.abc import Hashable
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import msgspec
import uvloop

from benchmarks.client import CHAT, MODEL
from benchmarks.engine_model import (
    BLOCK_IDS,
    FAST,
    REPLICAS,
    SLOW,
    EngineModel,
    Job,
    Speed,
    Totals,
    fleet_speeds,
)
from benchmarks.texts import CALL_ID, Answer, Words
from chat_tokenizer import ChatTokenizer

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_HEAD = b"HTTP/1.1 %b\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_STREAM = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_PROMPT = b'"prompt_token_ids":'
_MAX_MODEL_LEN = 1_000_000
_encode = msgspec.json.Encoder().encode


def _http(*body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"".join((_HEAD % (status, sum(map(len, body))), *body))


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@cache
def _logprob(piece: str) -> bytes:
    entry = {"token": piece, "logprob": -0.12345678, "bytes": list(piece.encode()), "top_logprobs": []}
    return _encode(entry)


def _logprobs(pieces: list[str]) -> dict[str, Any]:
    return {"content": msgspec.Raw(b"[" + b",".join(map(_logprob, pieces)) + b"]")}


def _usage(prompt: int, sampled: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _fields(kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    name = "chatcmpl-0123456789abcdef0123456789abcdef"
    return {"id": name, "object": kind, "created": 1763683200, "model": MODEL, "choices": choices}


def completion(answer: Answer, ids: bool, logprobs: bool, usage: dict[str, Any]) -> bytes:
    """The JSON of a chat completion, up to the value of its last field, `prompt_token_ids`."""
    choice = {
        "index": 0,
        "message": {"refusal": None, "tool_calls": [], **answer.message},
        "logprobs": _logprobs(answer.pieces) if logprobs else None,
        "finish_reason": "tool_calls" if answer.call else "stop",
        "stop_reason": None,
        "token_ids": answer.ids if ids else None,
    }
    rest = {"service_tier": None, "usage": usage, "prompt_logprobs": None, "kv_transfer_params": None}
    return _encode(_fields("chat.completion", [choice]) | rest)[:-1] + b"," + _PROMPT


class Canned:
    """The bytes of an answer. Each form is made when it is requested first."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self._count = answer, 0
        self._prompt = _encode(answer.prompt) if answer.prompt else b""
        self._usage = partial(_usage, len(answer.prompt))
        self._wholes = cache(
            lambda ids, logprobs: completion(answer, ids, logprobs, self._usage(len(answer.ids)))
        )
        self._streams = cache(self._stream)

    def whole(self, ids: bool, logprobs: bool, prompt: bytes) -> bytes:
        """A chat completion as an HTTP response.

        Args:
            prompt: the prompt's ids as a JSON array; empty for those of the answer.
        """
        form = self._wholes(ids, logprobs)
        if self.answer.call:
            self._count += 1
            form = form.replace(CALL_ID.encode(), b"call_%08d" % self._count, 1)
        return _http(form, (prompt or self._prompt or b"null") if ids else b"null", b"}")

    def stream(self, ids: bool, logprobs: bool, usage: bool, prompt: bytes) -> list[bytes]:
        """The parts of a streamed HTTP response: the head and the role, each id, the end."""
        first, rest = self._streams(ids, logprobs, usage)
        shown = (prompt or self._prompt or b"null") if ids else b"null"
        return [_STREAM + _http_chunk(b"".join((b"data: ", first, shown, b"}\n\n"))), *rest]

    def _stream(self, ids: bool, logprobs: bool, usage: bool) -> tuple[bytes, list[bytes]]:
        """The first chunk up to the prompt's ids, and all other parts."""
        answer, kind = self.answer, "chat.completion.chunk"
        delta: dict[str, Any] = {"role": "assistant", "content": ""}
        role = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        first = _fields(kind, [role]) | ({"usage": self._usage(0)} if usage else {})
        events = []
        for number, (piece, token) in enumerate(zip(answer.pieces, answer.ids, strict=True), 1):
            ends = number == len(answer.ids)
            choice = {
                "index": 0,
                "delta": {} if ends else {"content": piece},
                "logprobs": _logprobs([piece]) if logprobs else None,
                "finish_reason": "stop" if ends else None,
                "stop_reason": None,
                "token_ids": [token] if ids else None,
            }
            events.append(_fields(kind, [choice]) | ({"usage": self._usage(number)} if usage else {}))
        if usage:
            events.append(_fields(kind, []) | {"usage": self._usage(len(answer.ids))})
        parts = [_http_chunk(b"data: " + _encode(event) + b"\n\n") for event in events]
        return _encode(first)[:-1] + b"," + _PROMPT, [*parts, _http_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"]


class Engine:
    """One engine with canned answers."""

    def __init__(self, tokenizer: ChatTokenizer, answers: dict[str, Answer]) -> None:
        self._tokenizer = tokenizer
        self._answers = {name: Canned(answer) for name, answer in answers.items()}
        self._current = next(iter(self._answers.values()), None)
        self.service_s = 0.0
        self._loop = asyncio.get_running_loop()
        self.totals = Totals()
        model = {"id": MODEL, "object": "model", "owned_by": "vllm", "root": tokenizer.source, "parent": None}
        self._pages = {
            "/health": {},
            "/version": {"version": "0.32.0"},
            "/v1/models": {"object": "list", "data": [{**model, "max_model_len": _MAX_MODEL_LEN}]},
        }

    def respond(self, transport: asyncio.Transport, path: str, body: bytes) -> None:
        """Answer a request, or start to."""
        if path == CHAT:
            self.chat(transport, body)
        elif (page := self._page(path, body)) is not None:
            transport.write(_http(_encode(page)))
        else:
            transport.write(_http(b'{"detail":"Not Found"}', status=b"404 Not Found"))

    def chat(self, transport: asyncio.Transport, body: bytes) -> None:
        """Answer a chat request with the current answer."""
        assert self._current is not None
        whole, prompt = body, b""
        if (at := body.find(_PROMPT)) >= 0:
            start = body.index(b"[", at)
            end = body.index(b"]", start) + 1
            prompt, body = body[start:end], body[:at] + body[end:]
        ids, logprobs = _is_true(body, b'"return_token_ids":'), _is_true(body, b'"logprobs":')
        if ids and not prompt and (b'"max_tokens":1,' in body or not self._current.answer.prompt):
            prompt = _encode(self._render(whole))
        if _is_true(body, b'"stream":'):
            usage = _is_true(body, b'"continuous_usage_stats":')
            parts = self._current.stream(ids, logprobs, usage, prompt)
        else:
            parts = [self._current.whole(ids, logprobs, prompt)]
        self.totals.requests += 1
        if not self.service_s:
            self._write(transport, parts, 0)
        else:  # the first chunk has only the role
            self._write_timed(transport, parts, 0, self._loop.time(), self.service_s / (len(parts) - 1))

    def _write(self, transport: asyncio.Transport, parts: list[bytes], number: int) -> None:
        """Write one part per iteration of the event loop, so that each is a packet, as from an engine."""
        if transport.is_closing():
            return
        transport.write(parts[number])
        if number + 1 < len(parts):
            self._loop.call_soon(self._write, transport, parts, number + 1)

    def _write_timed(
        self, transport: asyncio.Transport, parts: list[bytes], number: int, begun: float, pause_s: float
    ) -> None:
        """Write a part now, and the others at their times; late ones at once: delays do not add up."""
        if transport.is_closing():
            return
        transport.write(parts[number])
        if number + 1 < len(parts):
            at = begun + (number + 1) * pause_s
            self._loop.call_at(at, self._write_timed, transport, parts, number + 1, begun, pause_s)

    def _page(self, path: str, body: bytes) -> Any:
        """The response to a request for anything but a completion; None if there is none."""
        command, _, value = path.removeprefix("/").partition("/")
        if path == "/tokenize":
            ids = self._render(body)
            return {"count": len(ids), "max_model_len": _MAX_MODEL_LEN, "tokens": ids}
        if command == "use" and value in self._answers:
            self._current, self.service_s = self._answers[value], 0.0
            return {"in use": value}
        if command == "service":
            self.service_s = float(value)
            return {"service_s": self.service_s}
        if command == "totals":
            return asdict(self.totals)
        return self._pages.get(path)

    def _render(self, body: bytes) -> list[int]:
        request = msgspec.json.decode(body)
        return self._tokenizer.render(request["messages"], tools=request.get("tools"))


class ModelledEngine(Engine):
    """One engine that samples whole answers at the speed of a model of vLLM."""

    def __init__(self, tokenizer: ChatTokenizer, speed: Speed, words: Words, seed: int) -> None:
        super().__init__(tokenizer, {})
        self.model = EngineModel(speed)
        self.totals = self.model.totals
        self._words, self._random = words, random.Random(seed)
        self._started = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._running: dict[Job, tuple[asyncio.Transport, Answer, bool, bool]] = {}

    def chat(self, transport: asyncio.Transport, body: bytes) -> None:
        """Submit a chat request to the model."""
        request = msgspec.json.decode(body)
        given = (request.get("kv_transfer_params") or {}).get("prompt_token_ids")
        limit = request.get("max_tokens") or request.get("max_completion_tokens") or 16
        compared = self._render(body) if limit == 1 else None  # with the proxy's own rendering
        prompt = array("i", given or compared or self._words.render(request["messages"]))
        answer = msgspec.structs.replace(self._words.sample(self._random, limit), prompt=prompt.tolist())
        job = Job(_block_keys((prompt + array("i", answer.ids)).tobytes()), len(prompt), len(answer.ids))
        evidence = (bool(request.get("return_token_ids")), bool(request.get("logprobs")))
        self._running[job] = (transport, answer, *evidence)
        if limit == 1:  # discovery: it must not wait for the model
            self._end(job)
            return
        self._advance()
        self.model.submit(self._loop.time() - self._started, job)
        self._schedule()

    def _end(self, job: Job) -> None:
        transport, answer, ids, logprobs = self._running.pop(job)
        usage = _usage(job.prompt_ids, job.completion_ids)
        form = completion(answer, ids, logprobs, usage)
        form = form.replace(CALL_ID.encode(), b"call_%016x" % self._random.getrandbits(64), 1)
        if not transport.is_closing():
            transport.write(_http(form, _encode(answer.prompt) if ids else b"null", b"}"))

    def _advance(self) -> None:
        for job in self.model.advance(self._loop.time() - self._started):
            self._end(job)

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        change, self._timer = self.model.next_change(), None
        if change is not None:
            self._timer = self._loop.call_at(self._started + change, self._changed)

    def _changed(self) -> None:
        self._advance()
        self._schedule()


class _Connection(asyncio.Protocol):
    """One connection. Requests must have a `content-length`, and must not be pipelined."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parts: list[bytes] = []
        self._head, self._path = b"", ""
        self._missing = 0
        """Bytes of the body that have not arrived."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from it

    def data_received(self, data: bytes) -> None:
        """Collect a request; when it is complete, hand it to the engine."""
        if not self._missing:
            data = self._head + data
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                self._head = data
                return
            head, data = data[:end], data[end:]
            length = _LENGTH.search(head)
            self._missing = int(length[1]) if length else 0
            self._path = head.split(b" ", 2)[1].decode().partition("?")[0]
        self._missing -= len(data)
        self._parts.append(data)
        if self._missing <= 0:
            body, self._head, self._parts, self._missing = b"".join(self._parts), b"", [], 0
            self._engine.respond(self._transport, self._path, body)


def _is_true(body: bytes, name: bytes) -> bool:
    """Whether a field is true. Its name with quotes and colon occurs in no JSON string."""
    at = body.find(name)
    return at >= 0 and body.startswith((b"true", b" true"), at + len(name))


def _block_keys(packed: bytes) -> list[Hashable]:
    """A key for each full block of ids, which also depends on all ids before it."""
    keys, key, size = list[Hashable](), 0, BLOCK_IDS * array("i").itemsize
    for start in range(0, len(packed) - size + 1, size):
        key = hash((key, packed[start : start + size]))
        keys.append(key)
    return keys


async def _serve(options: argparse.Namespace) -> None:
    loop, words, tokenizer = asyncio.get_running_loop(), Words(), ChatTokenizer.load(options.model)
    if options.answers is not None:
        answers = msgspec.msgpack.decode(options.answers.read_bytes(), type=dict[str, Answer])
        served = [Engine(tokenizer, answers)]
    else:
        speeds = fleet_speeds(FAST.slower(1 / options.faster), options.replicas, options.slow)
        served = [ModelledEngine(tokenizer, speed, words, n) for n, speed in enumerate(speeds)]
    servers = [
        await loop.create_server(partial(_Connection, engine), "127.0.0.1", 0, backlog=1024)
        for engine in served
    ]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, metavar="FOLDER", help="folder of the tokenizer")
    parser.add_argument("--answers", type=Path, metavar="FILE")
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    parser.add_argument("--slow", type=int, default=SLOW, help="how many of them are three times slower")
    parser.add_argument("--faster", type=float, default=1.0, help="run all engines this many times as fast")
    uvloop.run(_serve(parser.parse_args()))
