"""What the no-op engine samples in a conversation: the same turn each time, under an id of its own.

It says what vLLM says: the ids it was given, cut as bytes out of the request, the ids that it sampled, and
their log-probabilities. Only a conversation's first prompt is rendered here.
"""

import json
from typing import Any

from benchmarks.author import Author
from benchmarks.cases import MODEL
from tokenization import ChatTokenizer

SAID_TOKENS = 150
"""Of the text before the tool call, which has some 50 more."""
_GIVEN = b'"prompt_token_ids":['
_CALL_ID = "call_00000000"
_HEAD = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class Turns:
    """Answers chat requests of the benchmark's client."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._number = 0
        message, ids = Author(tokenizer).sampled(SAID_TOKENS)
        message["tool_calls"][0]["id"] = _CALL_ID
        spelled = [_entry(token) for token in tokenizer.token_strings(ids)]
        self._bodies = {
            quiet: _pieces(message, None if quiet else ids, None if quiet else spelled, len(ids))
            for quiet in (True, False)
        }

    def tokenize(self, request: dict[str, Any]) -> dict[str, Any]:
        """As the route /tokenize."""
        tokens = self._render(request)
        return {"count": len(tokens), "max_model_len": 1_000_000, "tokens": tokens}

    def answer(self, body: bytes, *, render: bool) -> bytes:
        """The next turn, as a whole HTTP answer.

        Args:
            render: whether messages are rendered where no ids are given; otherwise no ids are echoed.
        """
        asked = b'"return_token_ids":true' in body
        at = body.rfind(_GIVEN) if asked else -1
        prompt = b"null"
        if at >= 0:
            prompt = body[at + len(_GIVEN) - 1 : body.index(b"]", at) + 1]
        elif asked and render:
            prompt = json.dumps(self._render(json.loads(body)), separators=(",", ":")).encode()
        self._number += 1
        before, behind = self._bodies[not asked]
        length = len(before) + len(behind) + len(_CALL_ID) - len("call_") + len(prompt) + 1
        return b"".join((_HEAD % length, before, b"%08d" % self._number, behind, prompt, b"}"))

    def _render(self, request: dict[str, Any]) -> list[int]:
        return self._tokenizer.render(request["messages"], tools=request.get("tools"))


def _entry(token: str) -> dict[str, Any]:
    return {"token": token, "logprob": -0.12345678, "bytes": list(token.encode()), "top_logprobs": []}


def _pieces(message: dict[str, Any], ids: list[int] | None, logprobs: Any, count: int) -> tuple[bytes, bytes]:
    """A completion up to the number of its tool call, and from there to its last value, the prompt."""
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
    before, behind = whole.split(_CALL_ID.encode())
    return before + b"call_", behind.removesuffix(b"null}")
