"""The measured requests, and the canned responses of the no-op engine.

Requests have the headers of the OpenAI SDK and responses those of vLLM, because headers are a large part of
the cost of a small request.
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
"""Pause between the chunks of a paced stream: a fast engine's time per token."""

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
    """One kind of request, and how often to send it."""

    name: str
    path: str
    body: dict[str, Any]
    response: str
    """Name of the engine's canned response."""
    samples: int
    """Requests per round to measure the added latency; 0 if it is not measured."""
    connections: int
    """Concurrent requests to measure throughput."""
    added_ms: float | None = None
    """Aim: the maximum of the median added latency, in milliseconds."""
    per_second: float | None = None
    """Aim: the minimum of requests per second on one core."""

    @property
    def paced(self) -> bool:
        """Whether the engine pauses between chunks, so that the throughput is limited by it."""
        return self.response == "paced"

    def headers(self) -> dict[str, str]:
        """The request's headers, without its length."""
        return {**HEADERS, "x-response": self.response}

    def payload(self) -> bytes:
        """The body as compact JSON, as httpx encodes it."""
        return _dump({"model": MODEL, **self.body})

    def request(self) -> bytes:
        """The HTTP request as bytes."""
        return http_request(self.path, self.headers(), self.payload())


def http_request(path: str, headers: dict[str, str], payload: bytes) -> bytes:
    """An HTTP request as bytes."""
    headers = {**headers, "content-length": str(len(payload))}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + payload


def cases() -> list[Case]:
    """All cases that are measured."""
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    small: dict[str, float] = {"added_ms": 1.0, "per_second": 1500}
    large: dict[str, float] = {"added_ms": 5.0, "per_second": 200}
    few, many = ids(50), ids(MANY)
    without_ids = {"prompt_ids": many, "return_token_ids": False}
    stream = {"messages": chat, "stream": True}
    return [
        Case("small chat", CHAT, {"messages": chat}, "small", 100, 32, **small),
        Case("small token route", TOKENS, {"prompt_ids": few}, "tokens", 100, 32, **small),
        Case("100k ids in", TOKENS, without_ids, "small", 30, 8, **large),
        Case("100k ids out", TOKENS, {"prompt_ids": few}, "long", 30, 8, **large),
        Case("100k ids in, echoed", TOKENS, {"prompt_ids": many}, "echo", 30, 8, **large),
        Case("256-chunk stream", CHAT, stream, "stream", 30, 32),
        Case("the same, 5 ms apart", CHAT, stream, "paced", 0, 32),
    ]


def ids(count: int) -> list[int]:
    """Ids like those of a large vocabulary: mostly of five or six digits, and not compressible."""
    return [(n * 7919 + 12345) % 151_643 for n in range(count)]


def responses() -> dict[str, bytes]:
    """HTTP responses as bytes, by name. Streams are not among them: see `stream`."""
    few = ids(50)
    return {
        "small": http_response(_completion()),
        "tokens": http_response(_completion(few, ids(20))),
        "long": http_response(_completion(few, ids(MANY))),
        "echo": http_response(_completion(ids(MANY), ids(20))),
    }


def stream() -> list[bytes]:
    """The parts of a streamed HTTP response: the head, one HTTP chunk for each event, the end."""
    kind = b"content-type: text/event-stream; charset=utf-8\r\n"
    head = b"HTTP/1.1 200 OK\r\n" + kind + b"transfer-encoding: chunked\r\n\r\n"
    events = [b"data: " + _dump(_chunk(n)) + b"\n\n" for n in range(CHUNKS - 1)] + [b"data: [DONE]\n\n"]
    return [head, *(b"%x\r\n%b\r\n" % (len(event), event) for event in events), b"0\r\n\r\n"]


def http_response(value: object, status: str = "200 OK") -> bytes:
    """An HTTP response with a JSON body, as bytes."""
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
