"""Fuzzed HTTP requests: valid ones of every route, changed at one or more places.

A change is made to the JSON (a value replaced, removed, repeated, wrapped), to the bytes of the body, to the
path, the method, the headers, or to the framing of the message.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

_HI = [{"role": "user", "content": "Hi"}]
_CALL = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
_AGENT = [
    {"role": "system", "content": "Be brief."},
    *_HI,
    {"role": "assistant", "content": "", "tool_calls": [_CALL], "reasoning_content": "hm"},
    {"role": "tool", "tool_call_id": "call-1", "content": [{"type": "text", "text": "3"}]},
]
_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "d", "parameters": {"type": "object"}},
}
_CHAT: dict[str, Any] = {"model": "tiny", "messages": _HI, "max_tokens": 8}
_CHATS: list[dict[str, Any]] = [
    _CHAT,
    {**_CHAT, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {**_CHAT, "messages": _AGENT, "tools": [_TOOL], "tool_choice": "auto", "n": 2, "temperature": 0.5},
    {**_CHAT, "logprobs": True, "top_logprobs": 1, "return_token_ids": True, "seed": 1, "stop": ["x"]},
    {**_CHAT, "chat_template_kwargs": {"enable_thinking": False}, "response_format": {"type": "text"}},
    {**_CHAT, "kv_transfer_params": {"prompt_token_ids": [1, 74]}, "required_prefix_token_ids": [1, 74]},
]
_TOKENS: list[dict[str, Any]] = [
    {"prompt_ids": [1, 74, 75, 2], "max_tokens": 4},
    {"tokens": [1, 74, 75, 2], "append_messages": _HI, "stream": True},
    {"prompt_token_ids": [1, 74, 75, 2], "messages": _AGENT, "append_messages": _AGENT[3:], "n": 2},
    {**_CHAT, "return_token_ids": False},
]
_COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": [[1, 74, 75], [1, 76]], "n": 2, "max_tokens": 4, "logprobs": 0, "return_token_ids": True},
    {"prompt": [1, 74, 75], "stream": True, "stream_options": {"include_usage": True}},
    {"prompt": ["Hi", "there"], "stream": True, "temperature": 0.5},
    {"prompt": "Hi", "echo": True, "suffix": None, "truncate_prompt_tokens": None},
]
_RESPONSES: list[dict[str, Any]] = [
    {"input": "Hi", "instructions": "x", "stream": True, "max_output_tokens": 4, "include": []},
    {"input": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "hi"}], "tools": []},
    {"input": "Hi", "previous_response_id": "resp_1", "text": {"format": {"type": "json_object"}}},
]
_GENERATE: list[dict[str, Any]] = [
    {"token_ids": [1, 74, 75], "sampling_params": {"max_tokens": 4, "n": 2, "logprobs": 1}},
    {"token_ids": [1, 74, 75], "sampling_params": {}, "stream": True, "return_token_ids": True},
]
_TOKENIZE: list[dict[str, Any]] = [
    {"prompt": "Hi", "add_special_tokens": True},
    {"messages": _AGENT, "tools": [_TOOL], "add_generation_prompt": True},
    {"prompt_ids": [1, 74, 75, 2], "append_messages": _HI, "return_token_strs": True},
    {"messages": _HI, "required_prefix_token_ids": [1, 74, 2]},
]
_SESSIONS: list[dict[str, Any]] = [
    {},
    {"id": "run-1", "defaults": {"temperature": 1}, "overrides": {"max_tokens": 4}, "metadata": {"k": ["v"]}},
]
_REWARDS: list[dict[str, Any]] = [{"reward": 1.0}, {"rewards": {"": 0.5}}, {"reward": 1, "turn": "t"}]
_NAMES = ["run-1", "run-2", "session-1", "default"]

_Route = tuple[str, list[str], list[dict[str, Any] | None]]
_TURNS: list[_Route] = [
    ("POST", ["/v1/chat/completions", "/chat/completions/"], [*_CHATS]),
    ("POST", ["/sessions/{}/v1/chat/completions", "/sessions/{}/chat/completions"], [*_CHATS]),
    ("POST", ["/v1/chat/completions/tokens", "/sessions/{}/v1/chat/completions/tokens"], [*_TOKENS]),
    ("POST", ["/v1/completions", "/sessions/{}/v1/completions"], [*_COMPLETIONS]),
    ("POST", ["/inference/v1/generate"], [*_GENERATE]),
    ("POST", ["/v1/responses", "/sessions/{}/v1/responses", "/v1/responses/compact"], [*_RESPONSES]),
    ("POST", ["/tokenize", "/v1/tokenize", "/sessions/{}/v1/tokenize"], [*_TOKENIZE]),
]
_ROUTES: list[_Route] = [
    *_TURNS * 3,
    ("POST", ["/v1/sessions", "/sessions"], [*_SESSIONS]),
    ("GET", ["/v1/sessions?limit=3", "/v1/sessions?before=1.5:run-1&limit=2"], [None]),
    ("GET", ["/v1/sessions/{}", "/v1/sessions/{}?ids=true", "/sessions/{}"], [None]),
    ("GET", ["/v1/sessions/{}/samples", "/sessions/{}/samples?layout=verl&shared=each"], [None]),
    ("POST", ["/v1/sessions/{}/reward", "/sessions/{}/reward"], [*_REWARDS]),
    ("DELETE", ["/v1/sessions/{}"], [None]),
    ("GET", ["/health", "/ready", "/metrics", "/openapi.json", "/docs", "/v1/models"], [None]),
    ("POST", ["/v1/embeddings", "/v1/messages", "/detokenize", "/v1/nothing"], [_CHAT]),
]
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "get", "X-Y"]
_DEEP = "[" * 2000
_JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400, 0.1, -0.0, 1e308),
    *("", " ", "x", "\x00", "\ud800", "\U0010ffff", "\u202e", "null", "1", "true", "{}", "x" * 5000, "\n"),
    *("<|im_end|>", "<|im_start|>system", "{{ 7*7 }}", "{% raise %}", "../../etc/passwd", "tiny", "adapter"),
    *([], {}, [[]], [None], [{}], {"": ""}, {"a": {"b": []}}, [1, 74], [-1], [2**31], [0.5], ["1"], [True]),
    *([319], [320], [1] * 5000, [{"role": "user", "content": "Hi"}], [{"role": "user"}], [{"role": 1}]),
    *(
        [{"type": "text", "text": "a"}],
        [{"type": "image_url", "image_url": {"url": "data:,"}}],
        {"type": "x"},
    ),
    *("user", "assistant", "tool", "developer", float("nan"), float("inf")),
]
"""Values of every type, and the edges of those that mean something somewhere."""
_FIELDS = [
    *("stream", "n", "model", "messages", "tools", "prompt_ids", "tokens", "append_messages", "stop", "echo"),
    *("chat_template", "chat_template_kwargs", "documents", "reasoning_effort", "kv_transfer_params"),
    *("truncate_prompt_tokens", "add_generation_prompt", "continue_final_message", "return_token_ids"),
    *("required_prefix_token_ids", "logprobs", "stream_options", "include_reasoning", "id", "reward", "turn"),
    *("defaults", "overrides", "metadata", "temperature", "max_tokens", "\x00", "ä", ""),
    *("prompt", "token_ids", "sampling_params", "prompt_embeds", "suffix", "use_beam_search", "features"),
]
_BYTES = [
    b"",
    b"\x00",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b'"',
    b"{",
    b"}",
    b"[",
    b",",
    b":",
    b"\\u",
    b"\xef\xbb\xbf",
]
_BYTES += [b"NaN", b"-", b"1e999", _DEEP.encode(), b"\r\n\r\n", b"0\r\n\r\n", b"/*", b"'"]
_SEGMENTS = [
    *(
        "%00",
        "%2F",
        "%2e%2e",
        "..",
        ".",
        "//",
        "%",
        "%zz",
        "%ff",
        "%C3%A4",
        ";a=b",
        "?",
        "??",
        "?a=%ff&a",
        "#",
    ),
    *(
        "v1",
        "v1/v1",
        "sessions",
        "sessions//v1",
        "sessions/%20/v1/models",
        "x" * 300,
        "x" * 9000,
        "~",
        "@",
        ":",
    ),
    *("?limit=-1", "?limit=nan", "?limit=1e9", "?before=x", "?before=nan:x", "?before=1:%00", "?ids=maybe"),
    *("?layout=none", "?shared=never", "chat", "completions", "tokens", "samples", "reward", "'", "\\", "|"),
]
_HEADERS: list[bytes] = [
    *(
        b"x-session-id: %s" % name
        for name in (b"run-1", b"", b"..", b"a b", b"\xff", b"x" * 300, b"a/b", b"%00")
    ),
    *(b"idempotency-key: %s" % key for key in (b"k1", b"", b"\xe4", b"k" * 5000)),
    *(b"x-stainless-retry-count: %s" % count for count in (b"0", b"1", b"-1", b"many", b"9" * 5000, b"\xb2")),
    *(b"authorization: %s" % value for value in (b"Bearer x", b"Bearer", b"", b"Basic \xff", b"x" * 5000)),
    *(b"content-type: %s" % kind for kind in (b"text/plain", b"multipart/form-data; boundary=x", b"\xff")),
    *(b"accept-encoding: gzip, br", b"content-encoding: gzip", b"accept: text/event-stream", b"te: trailers"),
    *(b"connection: upgrade\r\nupgrade: websocket", b"upgrade: h2c", b"expect: 100-continue", b"expect: x"),
    *(
        b"cookie: a=b",
        b"host: ",
        b"host: a\r\nhost: b",
        b"origin: null",
        b"x-forwarded-for: 1",
        b"range: bytes=0-",
    ),
    *(
        b"x-y: \x80\xff",
        b"\xffname: x",
        b"x y: z",
        b"x-long: " + b"y" * 20000,
        b": empty",
        b"no colon",
        b"a\x00b: c",
    ),
    *(
        b"transfer-encoding: gzip",
        b"content-length: 3",
        b"content-length: -1",
        b"content-length: x",
        b"trailer: x",
    ),
    *(b"content-length: 99999999999999999999", b"keep-alive: x", b"proxy-connection: x", b"if-match: *"),
]
_FRAMINGS = ["plain", "plain", "plain", "chunked", "bad chunk", "short", "pipelined", "raw"]


@dataclass
class Fuzzed:
    """A request as bytes, and whether a server can find its end."""

    data: bytes
    complete: bool = True
    """False if the server may wait for more: the client then ends its side."""


def fuzzed_requests(seed: int, count: int) -> Iterator[Fuzzed]:
    """`count` requests; the same for the same seed.

    They are not drawn by hypothesis: it repeats parts of its examples, so that of 20,000 requests 2,667 were
    distinct, and it cannot make a failure smaller where the server keeps a state.
    """
    rng = Random(seed)
    for _ in range(count):
        yield _request(rng)


def _request(rng: Random) -> Fuzzed:
    method, paths, bodies = rng.choice(_ROUTES)
    path = rng.choice(paths).replace("{}", rng.choice(_NAMES))
    body = rng.choice(bodies)
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
    return _JUNK[number] if number < len(_JUNK) else _text(rng)


def _text(rng: Random) -> str:
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
    at, piece = rng.randint(0, max(0, len(content))), rng.choice(_BYTES)
    how = rng.randint(0, 3)
    if how == 0:
        return content[:at]
    if how == 1:
        return content[:at] + piece
    cut = at + (rng.randint(0, 20) if how == 2 else 0)
    return content[:at] + piece + content[cut:]


def _change_path(rng: Random, path: str) -> str:
    at, piece = rng.randint(0, len(path)), rng.choice(_SEGMENTS)
    how = rng.randint(0, 3)
    if how == 0:
        return f"/{piece}"
    if how == 1:
        return f"{path}/{piece}"
    if how == 2:
        return path[:at] + piece + path[at:]
    return f"http://proxy{path}"


def _framed(
    rng: Random, framing: str, method: str, path: str, headers: list[bytes], content: bytes
) -> Fuzzed:
    """The request on the wire. `connection: close` lets a client read until the end."""
    if not any(header.startswith(b"content-type") for header in headers):
        headers.append(b"content-type: application/json")
    names = b"\r\n".join([b"host: proxy", *headers])
    start = f"{method} {path} HTTP/1.1\r\n".encode() + names + b"\r\n"
    last = start + b"connection: close\r\n"
    odd = any(
        header.startswith((b"content-length", b"transfer-encoding", b"connection")) for header in headers
    )
    length = b"content-length: %d\r\n" % len(content)
    if framing == "chunked":
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (content[:9], content[9:]) if part)
        return Fuzzed(last + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n", not odd)
    if framing == "bad chunk":
        return Fuzzed(last + b"transfer-encoding: chunked\r\n\r\n" + b"zz\r\n" + content, False)
    if framing == "short":
        return Fuzzed(last + b"content-length: %d\r\n\r\n" % (len(content) + 5) + content, False)
    if framing == "pipelined":
        return Fuzzed(start + length + b"\r\n" + content + last + length + b"\r\n" + content, not odd)
    if framing == "raw":
        data = last + length + b"\r\n" + content
        at = rng.randint(0, len(start))
        return Fuzzed(data[:at] + rng.choice(_BYTES) + data[at:], False)
    return Fuzzed(last + length + b"\r\n" + content, not odd)
