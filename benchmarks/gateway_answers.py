"""The answers of the engine of `gateway.py`: vLLM's chat completions as bytes, with and without evidence."""

from functools import cache
from typing import Any

import msgspec

MODEL = "noop"
_NO_PROMPT = b"null"
_WHOLE = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_STREAM = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_PROMPT_FIELD = b',"prompt_token_ids":'
_encode = msgspec.json.Encoder().encode


class Answer(msgspec.Struct, frozen=True):
    """What is sampled for every request of a column, and the prompt that their messages render to."""

    prompt: list[int]
    ids: list[int]
    """The sampled ids; the last one is the stop token, which has no text."""
    pieces: list[str]
    """The text of each sampled id before the stop token."""

    @property
    def text(self) -> str:
        """The text of the answer."""
        return "".join(self.pieces)


class CannedAnswer:
    """The bytes of an answer. Each form is made when it is requested first."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._prompt = _encode(answer.prompt)
        self._forms = cache(self._whole)
        self._streams = cache(self._stream)

    def whole(self, ids: bool, logprobs: bool, sent: bytes) -> bytes:
        """A whole chat completion as an HTTP response.

        Args:
            sent: the prompt's ids in the request, as a JSON array; empty if there are none.
        """
        form = self._forms(ids, logprobs)
        if not ids:
            return form
        prompt = sent or self._prompt
        length = len(form) + len(_PROMPT_FIELD) + len(prompt) + 1
        return b"".join((_WHOLE % length, form, _PROMPT_FIELD, prompt, b"}"))

    def stream(self, ids: bool, logprobs: bool, usage: bool, sent: bytes) -> list[bytes]:
        """The parts of a streamed HTTP response: the head and the role, each id, the end."""
        first, rest = self._streams(ids, logprobs, usage)
        prompt = (sent or self._prompt) if ids else _NO_PROMPT
        return [_STREAM + _http_chunk(b"".join((b"data: ", first, prompt, b"}\n\n"))), *rest]

    def _whole(self, ids: bool, logprobs: bool) -> bytes:
        """The response without evidence, or the JSON up to the prompt's ids."""
        answer = self._answer
        entries = {"content": [_logprob(piece) for piece in (*answer.pieces, "")]}
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": answer.text, "refusal": None, "tool_calls": []},
            "logprobs": entries if logprobs else None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": answer.ids if ids else None,
        }
        completion = {
            **_head("chat.completion"),
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": self._usage(len(answer.ids)),
            "prompt_logprobs": None,
            "kv_transfer_params": None,
        }
        if ids:
            return _encode(completion)[:-1]
        body = _encode({**completion, "prompt_token_ids": None})
        return _WHOLE % len(body) + body

    def _stream(self, ids: bool, logprobs: bool, usage: bool) -> tuple[bytes, list[bytes]]:
        """The first chunk up to the prompt's ids, and all other parts."""
        answer = self._answer
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        chunk = _head("chat.completion.chunk")
        first = {**chunk, "choices": [{**role, "finish_reason": None}]}
        if usage:
            first["usage"] = self._usage(0)
        parts = []
        for number, (piece, token) in enumerate(zip((*answer.pieces, ""), answer.ids, strict=True), 1):
            ends = number == len(answer.ids)
            choice = {
                "index": 0,
                "delta": {} if ends else {"content": piece},
                "logprobs": {"content": [_logprob(piece)]} if logprobs else None,
                "finish_reason": "stop" if ends else None,
                "stop_reason": None,
                "token_ids": [token] if ids else None,
            }
            event = {**chunk, "choices": [choice]}
            if usage:
                event["usage"] = self._usage(number)
            parts.append(_http_chunk(b"data: " + _encode(event) + b"\n\n"))
        if usage:
            event = {**chunk, "choices": [], "usage": self._usage(len(answer.ids))}
            parts.append(_http_chunk(b"data: " + _encode(event) + b"\n\n"))
        return _encode(first)[:-1] + _PROMPT_FIELD, [*parts, _http_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"]

    def _usage(self, sampled: int) -> dict[str, int]:
        prompt = len(self._answer.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _head(kind: str) -> dict[str, Any]:
    name = "chatcmpl-0123456789abcdef0123456789abcdef"
    return {"id": name, "object": kind, "created": 1763683200, "model": MODEL}


def _logprob(piece: str) -> dict[str, Any]:
    return {"token": piece, "logprob": -0.12345678, "bytes": list(piece.encode()), "top_logprobs": []}


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
