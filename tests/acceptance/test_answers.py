"""Answers of our server and of a stock vLLM have the same shape, and errors the same status and wording.

Each request goes to the stock engine, then at the same time to the routes inside vLLM and to the proxy in
front of the stock engine. All are greedy and alone on their engine, so texts and ids are equal too. Numbers
that depend on what an engine computes together, and ids and times of a request, are compared by their type.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from tests.acceptance.conftest import Server
from tests.acceptance.formats import CHAT_TOOL, COMPLETIONS, MESSAGES, MODEL, RESPONSES, Fields, events_of
from tests.support.talk import CHAT, GENERATE, user

_HELLO = [user("Name a colour.")]
_IDS = [1, 4093, 198, 2683, 2, 198]
_FEW: Fields = {"max_tokens": 5, "temperature": 0}
_USAGE: Fields = {"stream": True, "stream_options": {"include_usage": True}}
_FORCED: Fields = {"tools": [CHAT_TOOL], "tool_choice": "required", "temperature": 0, "max_tokens": 64}
_SAMPLING: Fields = {"sampling_params": {"max_tokens": 4, "temperature": 0, "logprobs": 2}}
_OWN = frozenset(
    {
        *("id", "request_id", "created", "created_at", "completed_at", "item_id", "call_id", "root"),
        *("cached_tokens", "created_cache_tokens", "cache_read_input_tokens"),
    }
)
"""What differs between two equal requests."""
_SAID = frozenset(
    {
        *(
            "content",
            "type",
            "text",
            "role",
            "model",
            "stop_reason",
            "usage",
            "input_tokens",
            "output_tokens",
        ),
        *("cache_read_input_tokens", "object", "output", "incomplete_details", "reason", "total_tokens"),
    }
)
"""What the model said and what was counted. The rest of a message or a response is written by the proxy."""


_PIECES = ("content", "arguments", "text")
"""Texts that the events of a stream divide, in places that depend on its speed."""


@dataclass(frozen=True)
class Request:
    """A request, and what is compared of its answers."""

    path: str
    body: Fields | None = None
    method: str = "POST"
    only: frozenset[str] = frozenset()
    """Names of the values that are compared, at any depth; empty compares all of the stock engine's."""
    adds: frozenset[str] = frozenset()
    """Names of the values that the proxy adds where the stock engine has none of that name."""


_TOKEN_NAMES = frozenset({"token", "token_id"})
"""Of log-probabilities of generate: a release of vLLM has one of them."""

REQUESTS: dict[str, Request] = {
    "chat": Request(CHAT, {"messages": _HELLO, **_FEW}),
    "chat, ids and logprobs": Request(
        CHAT,
        {"messages": _HELLO, **_FEW, "return_token_ids": True, "logprobs": True, "top_logprobs": 2},
    ),
    "chat, streamed": Request(CHAT, {"messages": _HELLO, **_FEW, **_USAGE, "return_token_ids": True}),
    "chat, a forced call": Request(CHAT, {"messages": _HELLO, **_FORCED}),
    "chat, a forced call, streamed": Request(CHAT, {"messages": _HELLO, **_FORCED, **_USAGE}),
    "chat, two choices": Request(CHAT, {"messages": _HELLO, **_FEW, "n": 2}),
    "completions of a text": Request(COMPLETIONS, {"prompt": "One, two,", **_FEW, "logprobs": 1}),
    "completions of ids": Request(COMPLETIONS, {"prompt": [_IDS], **_FEW, "return_token_ids": True}),
    "completions, streamed": Request(COMPLETIONS, {"prompt": "One, two,", **_FEW, **_USAGE, "logprobs": 0}),
    "completions with echo": Request(COMPLETIONS, {"prompt": "One, two,", **_FEW, "echo": True}),
    "generate": Request(GENERATE, {"token_ids": _IDS, **_SAMPLING}, adds=_TOKEN_NAMES),
    "generate, streamed": Request(
        GENERATE, {"token_ids": _IDS, "stream": True, **_SAMPLING}, adds=_TOKEN_NAMES
    ),
    "messages": Request(MESSAGES, {"messages": _HELLO, **_FEW}, only=_SAID),
    "count_tokens": Request(f"{MESSAGES}/count_tokens", {"messages": _HELLO}, only=_SAID),
    "responses": Request(
        RESPONSES,
        {"input": _HELLO, "max_output_tokens": 5, "temperature": 0, "text": {"format": {"type": "text"}}},
        only=_SAID,
    ),
    "tokenize messages": Request("/tokenize", {"messages": _HELLO, "return_token_strs": True}),
    "tokenize text": Request("/tokenize", {"prompt": "two  words"}),
    "detokenize": Request("/detokenize", {"tokens": _IDS}),
    "models": Request("/v1/models", method="GET"),
    "version": Request("/version", method="GET"),
    "render": Request(f"{CHAT}/render", {"messages": _HELLO}),
    "unknown model": Request(CHAT, {"messages": _HELLO, "model": "nobody"}),
    "unknown model, streamed": Request(CHAT, {"messages": _HELLO, "model": "nobody", "stream": True}),
    "unknown model of completions": Request(COMPLETIONS, {"prompt": "Hi", "model": "nobody"}),
    "unknown model of messages": Request(MESSAGES, {"messages": _HELLO, "max_tokens": 1, "model": "nobody"}),
    "a bad field": Request(CHAT, {"messages": _HELLO, "temperature": -1}),
    "a bad field of completions": Request(COMPLETIONS, {"prompt": "Hi", "temperature": -1}),
    "beyond the context": Request(CHAT, {"messages": [user("a " * 9000)], "max_tokens": 1}),
    "beyond the context of completions": Request(COMPLETIONS, {"prompt": [5] * 9000, "max_tokens": 1}),
    "embeddings": Request("/v1/embeddings", {"input": "Hi"}),
    "unknown route": Request("/no/such/route", method="GET"),
    "method not allowed": Request("/v1/chat/completions", method="GET"),
}


def _ask(http: httpx.Client, request: Request) -> httpx.Response:
    body = None if request.body is None else {"model": MODEL, **request.body}
    return http.request(request.method, request.path, json=body)


def _shape(value: Any, request: Request) -> Any:
    if isinstance(value, Mapping):
        only, adds = request.only, request.adds
        kept = {name: one for name, one in value.items() if (not only or name in only) and name not in adds}
        return {name: type(one) if name in _OWN else _shape(one, request) for name, one in kept.items()}
    if isinstance(value, list):
        return [_shape(one, request) for one in value]
    return float if isinstance(value, float) else value


def _whole(events: Sequence[Fields]) -> Fields:
    """A stream as one object, however the events divide it."""
    whole: Fields = {}
    for event in events:
        whole = _joined("", whole, event)
    return whole


def _joined(name: str, before: Any, value: Any) -> Any:
    if isinstance(value, Mapping):
        known = before or {}
        return {**known, **{key: _joined(key, known.get(key), one) for key, one in value.items()}}
    if isinstance(value, list) and all(isinstance(one, Mapping) and "index" in one for one in value):
        found = {one["index"]: one for one in before or []}
        for one in value:
            found[one["index"]] = _joined("", found.get(one["index"]), one)
        return list(found.values())
    if isinstance(value, list) or (name in _PIECES and value):
        return before + value if before else value
    return before if value is None else value


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_those_of_a_stock_engine(servers: Mapping[str, Server], front: Server, name: str) -> None:
    request = REQUESTS[name]
    with httpx.Client(base_url=front.engine.url, timeout=90) as stock, ThreadPoolExecutor(2) as threads:
        expected = _ask(stock, request)
        answers = {way: threads.submit(_ask, server.http, request) for way, server in servers.items()}
        found = {way: answer.result() for way, answer in answers.items()}
    added = frozenset(name for name in request.adds if f'"{name}":' not in expected.text)
    request = replace(request, adds=added)
    assert {way: answer.status_code for way, answer in found.items()} == dict.fromkeys(
        servers, expected.status_code
    )
    for way, answer in found.items():
        if expected.is_error:
            _check_error(answer, expected)
        else:
            ours, theirs = (_shape(_whole(events_of(each)), request) for each in (answer, expected))
            assert ours == theirs, way


def _check_error(answer: httpx.Response, expected: httpx.Response) -> None:
    """The first sentence of the engine's message is in ours, and the code is equal."""
    ours, theirs = answer.json(), expected.json()
    if "error" in theirs:
        assert theirs["error"]["message"].partition(". ")[0].rstrip(".") in ours["error"]["message"]
        assert ours["error"].get("code") in (theirs["error"].get("code"), None)
    else:
        assert ours == theirs
