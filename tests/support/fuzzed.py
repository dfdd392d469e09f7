"""Fuzzed HTTP requests: valid ones of every route, changed at one or more places, and what may come back.

A change is made to the JSON (a value replaced, removed, repeated, wrapped), to the bytes of the body, to the
path, the method, the headers, or to the framing of the message.
"""

import asyncio
import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Any

from aiohttp import web

from tests.support.fake_vllm import FakeVllm, error_body
from tests.support.wire import Answer, send

Body = dict[str, Any]


def _words(text: str) -> list[str]:
    return text.split()


_HI = [{"role": "user", "content": "Hi"}]
_CALL = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
_AGENT = [
    {"role": "system", "content": "Be brief."},
    *_HI,
    {"role": "assistant", "content": "", "tool_calls": [_CALL], "reasoning_content": "hm"},
    {"role": "tool", "tool_call_id": "call-1", "content": [{"type": "text", "text": "3"}]},
]
_LOOK = {"name": "look", "description": "d", "parameters": {"type": "object"}}
_TOOL = {"type": "function", "function": _LOOK}
_CHAT: Body = {"model": "tiny", "messages": _HI, "max_tokens": 8}
_USAGE = {"include_usage": True, "continuous_usage_stats": True}
_CHATS: list[Body] = [
    _CHAT,
    {**_CHAT, "stream": True, "stream_options": _USAGE},
    {**_CHAT, "messages": _AGENT, "tools": [_TOOL], "tool_choice": "auto", "n": 2, "temperature": 0.5},
    {**_CHAT, "logprobs": True, "top_logprobs": 1, "return_token_ids": True, "seed": 1, "stop": ["x"]},
    {**_CHAT, "chat_template_kwargs": {"enable_thinking": False}, "response_format": {"type": "text"}},
    {**_CHAT, "kv_transfer_params": {"prompt_token_ids": [1, 74]}, "required_prefix_token_ids": [1, 74]},
]
_TOKENS: list[Body] = [
    {"prompt_ids": [1, 74, 75, 2], "max_tokens": 4},
    {"tokens": [1, 74, 75, 2], "append_messages": _HI, "stream": True},
    {"prompt_token_ids": [1, 74, 75, 2], "messages": _AGENT, "append_messages": _AGENT[3:], "n": 2},
    {**_CHAT, "return_token_ids": False},
]
_COMPLETIONS: list[Body] = [
    {"prompt": [[1, 74, 75], [1, 76]], "n": 2, "max_tokens": 4, "logprobs": 0, "return_token_ids": True},
    {"prompt": [1, 74, 75], "stream": True, "stream_options": {"include_usage": True}},
    {"prompt": ["Hi", "there"], "stream": True, "temperature": 0.5},
    {"prompt": "Hi", "echo": True, "suffix": None, "truncate_prompt_tokens": None},
]
_RESPONSES: list[Body] = [
    {"input": "Hi", "instructions": "x", "stream": True, "max_output_tokens": 4, "include": []},
    {"input": [*_HI, {"role": "assistant", "content": "hi"}], "tools": []},
    {"input": "Hi", "previous_response_id": "resp_1", "text": {"format": {"type": "json_object"}}},
]
_USE = {"type": "tool_use", "id": "call-1", "name": "look", "input": {"a": 1}}
_RESULT = {"type": "tool_result", "tool_use_id": "call-1", "content": [{"type": "text", "text": "3"}]}
_MESSAGES: list[Body] = [
    {**_CHAT, "system": "Be brief.", "stream": True, "thinking": {"type": "enabled", "budget_tokens": 1024}},
    {
        **_CHAT,
        "messages": [*_HI, {"role": "assistant", "content": [_USE]}, {"role": "user", "content": [_RESULT]}],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    },
]
_GENERATE: list[Body] = [
    {"token_ids": [1, 74, 75], "sampling_params": {"max_tokens": 4, "n": 2, "logprobs": 1}},
    {"token_ids": [1, 74, 75], "sampling_params": {}, "stream": True, "return_token_ids": True},
]
_TOKENIZE: list[Body] = [
    {"prompt": "Hi", "add_special_tokens": True},
    {"messages": _AGENT, "tools": [_TOOL], "add_generation_prompt": True},
    {"prompt_ids": [1, 74, 75, 2], "append_messages": _HI, "return_token_strs": True},
    {"messages": _HI, "required_prefix_token_ids": [1, 74, 2]},
]
_SESSION: Body = {"id": "run-1", "defaults": {"temperature": 1}, "metadata": {"k": ["v"]}}
_SESSION |= {"overrides": {"max_tokens": 4}}
_REWARDS: list[Body] = [{"reward": 1.0}, {"rewards": {"": 0.5}}, {"reward": 1, "turn": "t"}]
_NAMES = ["run-1", "run-2", "session-1", "default"]

_Route = tuple[str, str, list[Body]]
"""Method, paths, and bodies; none for a request without a body."""
_TURNS: list[_Route] = [
    ("POST", "/v1/chat/completions /chat/completions/", _CHATS),
    ("POST", "/sessions/{}/v1/chat/completions /sessions/{}/chat/completions", _CHATS),
    ("POST", "/v1/chat/completions/tokens /sessions/{}/v1/chat/completions/tokens", _TOKENS),
    ("POST", "/v1/completions /sessions/{}/v1/completions", _COMPLETIONS),
    ("POST", "/inference/v1/generate", _GENERATE),
    ("POST", "/v1/messages /v1/messages/count_tokens", _MESSAGES),
    ("POST", "/v1/responses /sessions/{}/v1/responses /v1/responses/compact", _RESPONSES),
    ("POST", "/tokenize /v1/tokenize /sessions/{}/v1/tokenize", _TOKENIZE),
]
_ROUTES: list[_Route] = [
    *_TURNS * 3,
    ("POST", "/v1/sessions /sessions", [{}, _SESSION]),
    ("GET", "/v1/sessions?limit=3 /v1/sessions?before=1.5:run-1&limit=2", []),
    ("GET", "/v1/sessions/{} /v1/sessions/{}?ids=true /sessions/{}", []),
    ("GET", "/v1/sessions/{}/samples /sessions/{}/samples?layout=verl&shared=each", []),
    ("POST", "/v1/sessions/{}/reward /sessions/{}/reward", _REWARDS),
    ("DELETE", "/v1/sessions/{}", []),
    ("GET", "/health /ready /metrics /openapi.json /docs /v1/models", []),
    ("POST", "/v1/embeddings /detokenize /v1/nothing", [_CHAT]),
]
_METHODS = _words("GET HEAD POST PUT PATCH DELETE OPTIONS TRACE PROPFIND get X-Y")
_JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400, 0.1, -0.0, 1e308),
    *("", " ", "x", "\x00", "\ud800", "\U0010ffff", "\u202e", "null", "1", "true", "{}", "x" * 5000, "\n"),
    *("<|im_end|>", "<|im_start|>system", "{{ 7*7 }}", "{% raise %}", "../../etc/passwd", "tiny", "adapter"),
    *([], {}, [[]], [None], [{}], {"": ""}, {"a": {"b": []}}, [1, 74], [-1], [2**31], [0.5], ["1"], [True]),
    *([319], [320], [1] * 5000, _HI, [{"role": "user"}], [{"role": 1}], [{"type": "text", "text": "a"}]),
    *([{"type": "image_url", "image_url": {"url": "data:,"}}], {"type": "x"}, float("nan"), float("inf")),
    *("user", "assistant", "tool", "developer"),
]
"""Values of every type, and the edges of those that mean something somewhere."""
_FIELDS = _words(
    """stream n model messages tools prompt_ids tokens append_messages stop echo chat_template reward turn
    chat_template_kwargs documents reasoning_effort kv_transfer_params truncate_prompt_tokens system thinking
    add_generation_prompt continue_final_message return_token_ids required_prefix_token_ids logprobs features
    stream_options include_reasoning defaults overrides max_tokens prompt token_ids sampling_params id suffix
    prompt_embeds use_beam_search metadata temperature ä"""
)
_FIELDS += ["\x00", ""]
_BYTES = [b"", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r\n\r\n", b"0\r\n\r\n", b"[" * 2000]
_BYTES += [word.encode() for word in _words(r""" " { } [ , : \u NaN - 1e999 /* ' """)]
_SEGMENTS = _words(
    r"""%00 %2F %2e%2e .. . // % %zz %ff %C3%A4 ;a=b ? ?? ?a=%ff&a # v1 v1/v1 sessions sessions//v1
    sessions/%20/v1/models ?limit=-1 ?limit=nan ?limit=1e9 ?before=x ?before=nan:x ?before=1:%00 ?ids=maybe
    ?layout=none ?shared=never chat completions tokens samples reward ~ @ : ' \ |"""
)
_SEGMENTS += ["x" * 300, "x" * 9000]
_HEADERS = [
    *(b"x-session-id: " + name for name in (b"run-1", b"", b"..", b"a b", b"\xff", b"x" * 300, b"%00")),
    *(b"idempotency-key: " + key for key in (b"k1", b"", b"\xe4", b"k" * 5000)),
    *(b"x-stainless-retry-count: " + count for count in (b"1", b"-1", b"many", b"9" * 5000, b"\xb2")),
    *(b"authorization: " + value for value in (b"Bearer x", b"Bearer", b"", b"Basic \xff", b"x" * 5000)),
    *(b"content-length: " + length for length in (b"3", b"-1", b"x", b"99999999999999999999")),
    *(b"content-type: text/plain", b"content-type: \xff", b"expect: 100-continue", b"host: ", b": empty"),
    *(b"connection: upgrade\r\nupgrade: websocket", b"accept-encoding: gzip, br", b"content-encoding: gzip"),
    *(b"transfer-encoding: gzip", b"te: trailers", b"trailer: x", b"upgrade: h2c", b"range: bytes=0-"),
    *(b"x-y: \x80\xff", b"\xffname: x", b"x y: z", b"no colon", b"a\x00b: c", b"x: " + b"y" * 20000),
]
_FRAMINGS = ["plain", "plain", "plain", "chunked", "bad chunk", "short", "pipelined", "raw"]
_NEVER = frozenset({500, 502, 503, 504})
"""Statuses that no request may get while the engine is well."""


class StrictVllm(FakeVllm):
    """Refuses what it cannot read with a 400, as vLLM's own validation does."""

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        try:
            return await super()._serve(request)
        except Exception as error:  # noqa: BLE001 - stands for a validation of everything
            body = error_body(f"{type(error).__name__}: {error}", "BadRequestError", None, 400)
            return web.Response(body=body, status=400, content_type="application/json")
        finally:
            self.requests.clear()

    def _refusal(self, body: dict[str, object], prompt: list[int], param: str) -> web.Response | None:
        if not isinstance(body.get("n") or 1, int) or not 0 < int(str(body.get("n") or 1)) <= 16:
            raise ValueError("n")
        return super()._refusal(body, prompt, param)


@dataclass(frozen=True)
class Fuzzed:
    """A request as bytes, and whether a server can find its end."""

    data: bytes
    complete: bool = True
    """False if the server may wait for more: the client then ends its side."""


@dataclass
class Outcome:
    """What came back."""

    statuses: Counter[int] = field(default_factory=Counter)
    distinct: set[int] = field(default_factory=set)
    """Hashes of the requests."""
    wrong: list[str] = field(default_factory=list)
    """Requests that were answered wrongly, as they were sent, with what came back."""


def send_fuzzed(
    address: tuple[str, int], seed: int, count: int, after_batch: Callable[[], None] = lambda: None
) -> Outcome:
    """Send `count` requests, 25 at once; the same for the same seed.

    They are not drawn by hypothesis: it repeats parts of its examples, so that of 20,000 requests 2,667 were
    distinct, and it cannot make a failure smaller where the server keeps a state.
    """
    rng, outcome = Random(seed), Outcome()

    async def batch(requests: list[Fuzzed]) -> list[Answer]:
        sending = (send(address, each.data, half_close=not each.complete) for each in requests)
        return await asyncio.gather(*sending)

    with asyncio.Runner() as runner:
        remaining = (_request(rng) for _ in range(count))
        while requests := list(islice(remaining, 25)):
            for request, answer in zip(requests, runner.run(batch(requests)), strict=True):
                outcome.statuses.update(answer.statuses)
                outcome.distinct.add(hash(request.data))
                if problem := _problem(request, answer):
                    outcome.wrong.append(f"{problem}: {request.data[:2000]!r} got {answer.data[:500]!r}")
            after_batch()
    return outcome


def _problem(request: Fuzzed, answer: Answer) -> str:
    """What is wrong with an answer; empty if nothing is."""
    if _NEVER.intersection(answer.statuses):
        return "the status"
    if not request.complete:
        return ""
    if not answer.statuses:
        return "no answer"
    try:
        if answer.statuses[-1] >= 400 and answer.body[:1] == b"{":
            json.loads(answer.body)
    except ValueError as error:
        return f"no JSON ({error})"
    return ""


def _request(rng: Random) -> Fuzzed:
    method, paths, bodies = rng.choice(_ROUTES)
    path = rng.choice(_words(paths)).replace("{}", rng.choice(_NAMES))
    body = rng.choice(bodies) if bodies else None
    headers: list[bytes] = []
    changes = rng.getrandbits(8)
    if body is not None and changes & 1:
        body = _change(rng, body)
        if changes & 2:
            body = _change(rng, body)
    content = b"" if body is None else json.dumps(body).encode()
    if changes & 12 == 12:
        content = _change_bytes(rng, content)
    if changes & 48 == 48:
        path = _change_path(rng, path)
    if changes & 64:
        headers.append(rng.choice(_HEADERS))
    if changes & 192 == 192:
        method = rng.choice(_METHODS)
    framing = rng.choice(_FRAMINGS) if changes & 3 == 2 else "plain"
    return _framed(rng, framing, method, path, headers, content)


def _junk(rng: Random) -> Any:
    number = rng.randint(0, len(_JUNK) + 5)
    if number < len(_JUNK):
        return _JUNK[number]
    return "".join(chr(rng.randrange(rng.choice((128, 0x110000)))) for _ in range(rng.randrange(9)))


def _change(rng: Random, body: Any) -> Any:
    """The JSON with one place of it changed."""
    body = copy.deepcopy(body)
    places = list(_places(body))
    if not places:
        return {rng.choice(_FIELDS): _junk(rng)}
    holder, key = rng.choice(places)
    how = rng.randint(0, 9)
    if how == 0:
        del holder[key]
    elif how == 1:
        holder[key] = [holder[key]]
    elif how == 2 and isinstance(holder, list):
        holder += holder[:1] * rng.randint(1, 50)
    elif how <= 4 and isinstance(holder, dict):
        holder[rng.choice(_FIELDS)] = _junk(rng)
    else:
        holder[key] = _junk(rng)
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a JSON value: (what holds it, its key or index)."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _change_bytes(rng: Random, content: bytes) -> bytes:
    at, piece, how = rng.randint(0, len(content)), rng.choice(_BYTES), rng.randint(0, 3)
    if how <= 1:
        return content[:at] + piece * how
    return content[:at] + piece + content[at + (rng.randint(0, 20) if how == 2 else 0) :]


def _change_path(rng: Random, path: str) -> str:
    at, piece = rng.randint(0, len(path)), rng.choice(_SEGMENTS)
    return rng.choice((f"/{piece}", f"{path}/{piece}", path[:at] + piece + path[at:], f"http://proxy{path}"))


def _framed(
    rng: Random, framing: str, method: str, path: str, headers: list[bytes], content: bytes
) -> Fuzzed:
    """The request on the wire. `connection: close` lets a client read until the end."""
    if not any(header.startswith(b"content-type") for header in headers):
        headers.append(b"content-type: application/json")
    start = f"{method} {path} HTTP/1.1\r\n".encode() + b"\r\n".join([b"host: localhost", *headers]) + b"\r\n"
    last = start + b"connection: close\r\n"
    ends = (b"content-length", b"transfer-encoding", b"connection")
    odd = any(header.startswith(ends) for header in headers)
    sized = b"content-length: %d\r\n\r\n" % len(content) + content
    chunked = b"transfer-encoding: chunked\r\n\r\n"
    if framing == "chunked":
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (content[:9], content[9:]) if part)
        return Fuzzed(last + chunked + chunks + b"0\r\n\r\n", not odd)
    if framing == "bad chunk":
        return Fuzzed(last + chunked + b"zz\r\n" + content, False)
    if framing == "short":
        return Fuzzed(last + b"content-length: %d\r\n\r\n" % (len(content) + 5) + content, False)
    if framing == "pipelined":
        return Fuzzed(start + sized + last + sized, not odd)
    if framing == "raw":
        at = rng.randint(0, len(start))
        return Fuzzed((last + sized)[:at] + rng.choice(_BYTES) + (last + sized)[at:], False)
    return Fuzzed(last + sized, not odd)
