"""What is asked and what is answered: the requests of clients, and the canned answers of the no-op engine.

Requests carry the header set of the OpenAI SDK, answers those of vLLM, because headers are a good part of
what a small request costs.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
TOKENS = "/v1/chat/completions/tokens"
MODEL = "noop"
CHUNKS = 256
MANY = 100_000
PACE_S = 0.005
"""Between the chunks of a paced stream: a fast engine's time per token."""

HEADERS = {
    "host": "127.0.0.1",
    "accept-encoding": "gzip, deflate",
    "connection": "keep-alive",
    "accept": "application/json",
    "content-type": "application/json",
    "user-agent": "OpenAI/Python 2.25.0",
    "x-stainless-lang": "python",
    "x-stainless-package-version": "2.25.0",
    "x-stainless-os": "Linux",
    "x-stainless-arch": "x64",
    "x-stainless-runtime": "CPython",
    "x-stainless-runtime-version": "3.11.7",
    "authorization": "Bearer none",
    "x-stainless-async": "async:asyncio",
    "x-stainless-retry-count": "0",
    "x-stainless-read-timeout": "600",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of request, and how hard to try it."""

    name: str
    path: str
    body: dict[str, Any]
    answer: str
    """Which canned answer the engine gives."""
    samples: int
    """Requests for the added latency, per round; 0 where one has no meaning."""
    connections: int
    """Requests at once, for throughput."""
    added_ms: float | None = None
    """Aim: at most this many milliseconds added at the median."""
    per_second: float | None = None
    """Aim: at least this many requests a second on one core."""

    @property
    def paced(self) -> bool:
        """Whether the engine takes its time, so that the rate says nothing."""
        return self.answer == "paced"

    def headers(self) -> dict[str, str]:
        """What a client sends beside the body."""
        return {**HEADERS, "x-answer": self.answer}

    def payload(self) -> bytes:
        """The body as JSON, as compact as httpx makes it."""
        return _dump({"model": MODEL, **self.body})

    def request(self) -> bytes:
        """The whole HTTP request."""
        return http_request(self.path, self.headers(), self.payload())


def http_request(path: str, headers: dict[str, str], payload: bytes) -> bytes:
    """A whole HTTP request."""
    headers = {**headers, "content-length": str(len(payload))}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + payload


def cases() -> list[Case]:
    """Everything that is measured."""
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    small: dict[str, float] = {"added_ms": 1.0, "per_second": 1500}
    large: dict[str, float] = {"added_ms": 5.0, "per_second": 200}
    few, many = ids(50), ids(MANY)
    quiet = {"prompt_ids": many, "return_token_ids": False}
    stream = {"messages": chat, "stream": True}
    return [
        Case("small chat", CHAT, {"messages": chat}, "small", 100, 32, **small),
        Case("small token route", TOKENS, {"prompt_ids": few}, "tokens", 100, 32, **small),
        Case("100k ids in", TOKENS, quiet, "small", 30, 8, **large),
        Case("100k ids out", TOKENS, {"prompt_ids": few}, "long", 30, 8, **large),
        Case("100k ids in, echoed", TOKENS, {"prompt_ids": many}, "echo", 30, 8, **large),
        Case("256-chunk stream", CHAT, stream, "stream", 30, 32),
        Case("the same, 5 ms apart", CHAT, stream, "paced", 0, 32),
    ]


def ids(count: int) -> list[int]:
    """Ids as large vocabularies have them: five or six digits mostly, and no run that compresses."""
    return [(n * 7919 + 12345) % 151_643 for n in range(count)]


def answers() -> dict[str, bytes]:
    """Whole HTTP answers by name. Streams have none: they come in pieces."""
    few = ids(50)
    return {
        "small": answer(_completion()),
        "tokens": answer(_completion(few, ids(20))),
        "long": answer(_completion(few, ids(MANY))),
        "echo": answer(_completion(ids(MANY), ids(20))),
    }


def stream() -> list[bytes]:
    """A stream of chunks: the head, one HTTP chunk for each event, the end."""
    kind = b"content-type: text/event-stream; charset=utf-8\r\n"
    head = b"HTTP/1.1 200 OK\r\n" + kind + b"transfer-encoding: chunked\r\n\r\n"
    events = [b"data: " + _dump(_chunk(n)) + b"\n\n" for n in range(CHUNKS - 1)] + [b"data: [DONE]\n\n"]
    return [head, *(b"%x\r\n%b\r\n" % (len(event), event) for event in events), b"0\r\n\r\n"]


def answer(value: object, status: str = "200 OK") -> bytes:
    """A whole HTTP answer with a JSON body."""
    body = _dump(value)
    head = f"HTTP/1.1 {status}\r\ndate: Fri, 21 Nov 2025 00:00:00 GMT\r\nserver: uvicorn\r\n"
    return f"{head}content-length: {len(body)}\r\ncontent-type: application/json\r\n\r\n".encode() + body


def _completion(prompt: Sequence[int] | None = None, sampled: Sequence[int] | None = None) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": "Paris.", "reasoning": None, "tool_calls": []},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    completion: dict[str, Any] = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion",
        "created": 1763683200,
        "model": MODEL,
        "choices": [choice],
        "usage": {"prompt_tokens": 21, "completion_tokens": 3, "total_tokens": 24},
    }
    if sampled is not None:
        choice["token_ids"] = sampled
        completion["prompt_token_ids"] = prompt
    return completion


def _chunk(number: int) -> dict[str, Any]:
    delta = {"content": f" word{number:03d}", "reasoning": None}
    return {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1763683200,
        "model": MODEL,
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}],
    }


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
