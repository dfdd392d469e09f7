"""The no-op engine's turns in a conversation: always the same completion, with a new tool-call id.

A response has the fields of vLLM's: the prompt ids, cut as bytes out of the request, the sampled ids, and
their log-probabilities. Only the first prompt of a conversation is rendered here.
"""

import json
from typing import Any

from benchmarks.author import Author
from benchmarks.cases import MODEL
from tokenization import ChatTokenizer

TEXT_TOKENS = 150
"""Tokens of the text; the tool call after it has about 50 more."""
_PROMPT_FIELD = b'"prompt_token_ids":['
_CALL_ID = "call_00000000"
_HEAD = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class Turns:
    """Responds to the chat requests of the benchmark's client."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._number = 0
        message, ids = Author(tokenizer).sampled(TEXT_TOKENS)
        message["tool_calls"][0]["id"] = _CALL_ID
        logprobs = [_entry(token) for token in tokenizer.token_strings(ids)]
        self._bodies = {
            without_ids: _pieces(
                message, None if without_ids else ids, None if without_ids else logprobs, len(ids)
            )
            for without_ids in (True, False)
        }

    def tokenize(self, request: dict[str, Any]) -> dict[str, Any]:
        """The response of `/tokenize`."""
        tokens = self._render(request)
        return {"count": len(tokens), "max_model_len": 1_000_000, "tokens": tokens}

    def respond(self, body: bytes, *, render: bool) -> bytes:
        """The next turn, as an HTTP response.

        Args:
            render: whether to render the messages if the request has no ids; else no prompt ids are returned.
        """
        with_ids = b'"return_token_ids":true' in body
        at = body.rfind(_PROMPT_FIELD) if with_ids else -1
        prompt = b"null"
        if at >= 0:
            prompt = body[at + len(_PROMPT_FIELD) - 1 : body.index(b"]", at) + 1]
        elif with_ids and render:
            prompt = json.dumps(self._render(json.loads(body)), separators=(",", ":")).encode()
        self._number += 1
        before, after = self._bodies[not with_ids]
        length = len(before) + len(after) + len(_CALL_ID) - len("call_") + len(prompt) + 1
        return b"".join((_HEAD % length, before, b"%08d" % self._number, after, prompt, b"}"))

    def _render(self, request: dict[str, Any]) -> list[int]:
        return self._tokenizer.render(request["messages"], tools=request.get("tools"))


def _entry(token: str) -> dict[str, Any]:
    return {"token": token, "logprob": -0.12345678, "bytes": list(token.encode()), "top_logprobs": []}


def _pieces(message: dict[str, Any], ids: list[int] | None, logprobs: Any, count: int) -> tuple[bytes, bytes]:
    """The completion's bytes before the number of its tool-call id, and from there to the prompt ids."""
    choice = {
        "index": 0,
        "message": {**message, "refusal": None, "reasoning": None},
        "logprobs": logprobs and {"content": logprobs},
        "finish_reason": "tool_calls",
        "stop_reason": None,
        "token_ids": ids,
    }
    completion = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion",
        "created": 1763683200,
        "model": MODEL,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {"prompt_tokens": 0, "total_tokens": count, "completion_tokens": count},
        "prompt_logprobs": None,
        "kv_transfer_params": None,
        "prompt_token_ids": None,
    }
    whole = json.dumps(completion, separators=(",", ":")).encode()
    before, after = whole.split(_CALL_ID.encode())
    return before + b"call_", after.removesuffix(b"null}")
