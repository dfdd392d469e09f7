"""The answer to a request whose session has reached a limit: a final message that no engine sampled.

It is written in the engine's format, and the request's own format is made of it as of an engine's answer. It
is not recorded, and not kept for a retry.
"""

import logging
import time
from itertools import islice
from typing import Any

import msgspec

from tokenproxy.base.http import EVENT_HEADERS, JSON_HEADERS, BytesResponse, Response, StreamResponse
from tokenproxy.base.request import ChatRequest, EngineRoute, GivenIds
from tokenproxy.engine.sse import data_event
from tokenproxy.record.completion import Completion
from tokenproxy.record.turn import new_id
from tokenproxy.turn import parsing
from tokenproxy.turn.answer import Answer, StreamedAnswer

log = logging.getLogger("tokenproxy")

_MOST_CHOICES = 4096
"""Of one answer: no engine has checked how many the request wants."""


async def limit_answer(request: ChatRequest, answer: Answer) -> Response:
    """Answer a request without an engine, so that a program accepts the answer and ends.

    Args:
        answer: what writes the response.

    Raises:
        ApiError: the response is to be stored, and the store does not respond.
    """
    assert request.session is not None  # it has a limit
    name, limit = request.session.name, request.session_limit
    log.info("session %s has reached its limit `%s`: a request was answered without an engine", name, limit)
    told = [(b"x-session-limit", limit.encode()), (b"x-session-id", name.encode())]
    if not request.stream or not isinstance(answer, StreamedAnswer):
        body = msgspec.json.encode(_completion(request, "message"))
        shown = answer.whole(parsing.parse(body, tokens=answer.reads_tokens), body, Completion())
        await answer.settle()
        return BytesResponse(200, [*JSON_HEADERS, *told], shown)
    chunk, shown = _completion(request, "delta"), b""
    for part in (chunk, {**chunk, "choices": []}):
        data = msgspec.json.encode(part)
        shown += answer.event(data_event(data), None, parsing.parse(data, tokens=answer.reads_tokens)) or b""
    shown += answer.end()
    await answer.settle()
    stream = BytesResponse(200, [], shown)  # its beginning may be sent already, unlike that of a replay
    return StreamResponse(200, [*EVENT_HEADERS, *told], stream.chunks(), stream)


def _completion(request: ChatRequest, message: str) -> dict[str, Any]:
    """A completion of no sampled ids, or the only chunk of one.

    Args:
        message: the name of the field with the message of a choice.
    """
    name, prompts = new_id(), request.prompts or (request.given,)
    chat = "chat.completion.chunk" if request.stream else "chat.completion"
    each = (_choice(request, message, prompt) for prompt in prompts for _ in range(request.choices))
    choices = enumerate(islice(each, _MOST_CHOICES))
    return {
        "id": name,
        "request_id": name,
        "object": chat if request.engine_route is EngineRoute.CHAT else "text_completion",
        "created": int(time.time()),
        "model": request.model or "",
        "prompt_token_ids": _ids(prompts[0]),
        "choices": [{"index": index, **choice} for index, choice in choices],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


def _choice(request: ChatRequest, message: str, prompt: GivenIds | None) -> dict[str, Any]:
    choice: dict[str, Any] = {"finish_reason": "stop", "stop_reason": None, "token_ids": []}
    if request.engine_route is EngineRoute.COMPLETIONS:
        logprobs: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        return {**choice, "text": "", "logprobs": logprobs, "prompt_token_ids": _ids(prompt)}
    choice["logprobs"] = {"content": []}
    if request.engine_route is EngineRoute.CHAT:
        text = f"The session has reached its limit ({request.session_limit}): this answer ends it."
        choice[message] = {"role": "assistant", "content": text}
    return choice


def _ids(given: GivenIds | None) -> msgspec.Raw:
    """The ids of a prompt as the client sent them; none for a text or messages."""
    return msgspec.Raw(given.raw if given else b"[]")
