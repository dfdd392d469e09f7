"""Convert a response of vLLM's generate route into a chat completion, as vLLM's chat route returns it.

`/derender` parses the message: text, tool calls, reasoning. Everything else is copied from the generate
response, because derender drops or changes it: ids, log-probabilities, usage, finish reasons.

Differences from the chat route: a stream has one chunk for each message, when all are complete; there is no
`system_fingerprint`; `usage` counts neither reasoning tokens nor tokens written to the cache; special tokens
inside a text are shown if a parser is configured; hidden reasoning (`include_reasoning: false`) does not hide
its ids.

A log-probability names its token by its text, or as `token_id:N` if the client requests that
(`return_tokens_as_token_ids`), or if the generate route does not support `output_mode`.
"""

from typing import Any, TypeVar

import msgspec

from chat_tokenizer import ids
from tokenproxy.base.errors import BadRequest, EngineBroken
from tokenproxy.base.fields import NULL, flag, join, parse, raw, raw_value, read, stream_options
from tokenproxy.base.http import JSON_HEADERS, BytesResponse, Request
from tokenproxy.base.types import Fields
from tokenproxy.engine.protocol import Engine, fetch
from tokenproxy.engine.sse import data_event
from tokenproxy.engine.token_in import TokenRequest, error_headers

T = TypeVar("T")

GENERATE_PATH = "/inference/v1/generate"
DERENDER_PATH = "/v1/chat/completions/derender"
_NULL = msgspec.Raw(NULL)
_STOP = b'"stop"'
_PLACEHOLDER_IDS = [0]
"""Sent for a choice with no text: derender rejects an empty list. The parsed result is discarded."""
_EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")


class _Logprob(msgspec.Struct):
    """One token of a generate response, in any of the shapes that the route returns."""

    logprob: float = -9999.0
    token: str | None = None
    token_id: int | None = None
    bytes: list[int] | None = None
    top_logprobs: list["_Logprob"] = []


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class Derender:
    """Converts the generate response to one request."""

    def __init__(self, engine: Engine, request: TokenRequest, chat: Fields, sampling: Fields) -> None:
        """`chat` is the client's request, for parsers; `sampling`, the parameters that render resolved."""
        fields = request.fields
        self._engine = engine
        self._request = request
        self._chat = chat
        self._stream = flag(fields, "stream")
        self._with_ids = flag(fields, "return_token_ids")
        self._with_stop = flag(fields, "include_stop_str_in_output")
        self._with_special = raw_value(sampling, "skip_special_tokens") == b"false"
        self._top_logprobs = read(fields, "top_logprobs", int) or 0
        self._tool_choice = raw_value(fields, "tool_choice") or b'"auto"'

    async def response(self, generate: BytesResponse) -> BytesResponse:
        """The chat completion, or its stream of chunks; derender's own response if that is an error.

        Raises:
            EngineBroken: a response of generate or derender is malformed.
        """
        generated = parse_response(generate.body, GENERATE_PATH)
        sampled = _choices(generated, GENERATE_PATH)
        text_ids = [self._text_ids(choice) for choice in sampled]
        status, completion = await self._derender(generated, sampled, text_ids)
        if status != 200:
            return BytesResponse(status, list(JSON_HEADERS), join(completion))
        completion["id"] = _chat_id(completion)
        for name in ("usage", "created"):
            if raw_value(generated, name) is not None:
                completion[name] = generated[name]
        choices = _choices(completion, DERENDER_PATH)
        if len(choices) != len(sampled):
            raise EngineBroken(f"{DERENDER_PATH} returned {len(choices)} choices for {len(sampled)}")
        for choice, source, tokens in zip(choices, sampled, text_ids, strict=True):
            self._rewrite_choice(choice, source, has_text=bool(tokens))
        completion["prompt_token_ids"] = self._echo(generated)
        if self._stream:
            return BytesResponse(200, [_EVENT_STREAM], self._events(completion, choices))
        completion["choices"] = raw(choices)
        return BytesResponse(200, error_headers(generate.headers), join(completion))

    async def _derender(
        self, generated: Fields, sampled: list[Fields], text_ids: list[list[int]]
    ) -> tuple[int, Fields]:
        """Let derender parse the messages; returns its status and the response's fields."""
        kept = ("index", "finish_reason", "stop_reason")
        inputs = [
            {**{name: choice[name] for name in kept if name in choice}, "token_ids": raw(tokens)}
            for choice, tokens in zip(sampled, [each or _PLACEHOLDER_IDS for each in text_ids], strict=True)
        ]
        dropped = ("output_mode", "prompt_token_ids", "mm_placeholders")
        response = {name: value for name, value in generated.items() if name not in dropped}
        prompt = self._request.prompt_ids
        fields = {
            "generate_response": msgspec.Raw(join({**response, "choices": raw(inputs)})),
            "model": self._request.fields.get("model", _NULL),
            "prompt_tokens": raw(ids.check(prompt)),
            "prompt_token_ids": msgspec.Raw(prompt),
            "chat_request": msgspec.Raw(join(self._chat)),
        }
        call = Request("POST", DERENDER_PATH, self._request.headers, join(fields), repeatable=True)
        status, body = await fetch(self._engine, call)
        return status, parse_response(body, DERENDER_PATH)

    def _events(self, completion: Fields, choices: list[Fields]) -> bytes:
        """The stream of a completion: for each choice the role, then the message; at the end the usage."""
        prompt = completion["prompt_token_ids"]
        common: Fields = {"object": raw("chat.completion.chunk")}
        common |= {name: completion[name] for name in ("id", "created", "model") if name in completion}
        chunks: list[Fields] = []
        for choice in choices:
            start = {"role": "assistant", "content": ""}
            head = {"index": choice["index"], "delta": start, "logprobs": None, "finish_reason": None}
            chunks.append({**common, "choices": raw([head]), "prompt_token_ids": prompt})
        for choice in choices:
            delta = _without_nulls(msgspec.json.decode(choice.pop("message")))
            del delta["role"]
            for index, call in enumerate(delta.get("tool_calls", ())):
                call["index"] = index
            chunks.append({**common, "choices": raw([{**choice, "delta": delta}])})
        if flag(stream_options(self._request.fields), "include_usage"):
            chunks.append({**common, "choices": raw([]), "usage": completion.get("usage", _NULL)})
        return b"".join(map(data_event, [*map(join, chunks), b"[DONE]"]))

    def _echo(self, generated: Fields) -> msgspec.Raw:
        """The prompt for the client: as the engine returns it if it expanded images in it."""
        if not self._with_ids:
            return _NULL
        prompt = msgspec.Raw(self._request.prompt_ids)
        return generated.get("prompt_token_ids", prompt) if self._request.images else prompt

    def _text_ids(self, choice: Fields) -> list[int]:
        """The ids to decode the message's text from: without the stop token, unless the client requests it.

        `[74, 75, 2]` with `finish_reason: "stop"` gives `[74, 75]`. Stop strings are refused here, so "stop"
        always means that the last id is the stop token.
        """
        tokens = read_response_field(choice, "token_ids", list[int], GENERATE_PATH) or []
        # no stop_reason: the stop token is the model's end of turn, which is a special token
        shown = self._with_stop and (self._with_special or raw_value(choice, "stop_reason") is not None)
        return tokens[:-1] if raw_value(choice, "finish_reason") == _STOP and not shown else tokens

    def _rewrite_choice(self, choice: Fields, source: Fields, *, has_text: bool) -> None:
        """Change a choice of derender in place to what the chat route returns."""
        message = read_response_field(choice, "message", Fields, DERENDER_PATH) or {}
        calls = read_response_field(message, "tool_calls", list[msgspec.Raw], DERENDER_PATH) or []
        if not has_text:
            calls = []
            message = {name: _NULL for name in message if name != "tool_calls"} | {"content": raw("")}
        elif calls and raw_value(self._request.fields, "parallel_tool_calls") == b"false":
            message["tool_calls"] = raw(calls[:1])
        reason, required = source.get("finish_reason", _NULL), self._tool_choice == b'"required"'
        ends_with_calls = required or (bool(calls) and self._tool_choice == b'"auto"')
        if required or self._stream:  # the chat route's rule: such calls that were cut short keep "length"
            ends_with_calls = ends_with_calls and bytes(reason) == _STOP
        choice["message"] = msgspec.Raw(join(message | {"role": raw("assistant")}))
        choice["finish_reason"] = raw("tool_calls") if ends_with_calls else reason
        choice["stop_reason"] = source.get("stop_reason", _NULL)
        choice["token_ids"] = source.get("token_ids", _NULL) if self._with_ids else _NULL
        logprobs = read_response_field(source, "logprobs", _Logprobs, GENERATE_PATH)
        choice["logprobs"] = _NULL if logprobs is None else raw(_chat_logprobs(logprobs, self._top_logprobs))
        for name in ("weight_versions", "routed_experts", "sampling_mask"):
            if raw_value(source, name) is not None:
                choice[name] = source[name]


def parse_response(body: bytes, path: str) -> Fields:
    """Parse the body of an engine's response. An error is a 502, not the 400 that `parse` raises for clients.

    Raises:
        EngineBroken: the body is not a JSON object.
    """
    try:
        return parse(body)
    except BadRequest as error:
        raise EngineBroken(f"{path} returned a body that is not a JSON object") from error


def read_response_field(fields: Fields, name: str, kind: type[T], path: str) -> T | None:
    """Read a field of an engine's response as a value of `kind`; None if it is missing or null.

    Raises:
        EngineBroken: the value has another type.
    """
    try:
        return read(fields, name, kind)
    except BadRequest as error:
        raise EngineBroken(f"{path} returned an invalid `{name}`: {error}") from error


def _choices(fields: Fields, path: str) -> list[Fields]:
    return read_response_field(fields, "choices", list[Fields], path) or []


def _chat_id(fields: Fields) -> msgspec.Raw:
    """The completion's id with the chat route's prefix: `generate-tokens-7f` becomes `chatcmpl-7f`."""
    completion_id = read_response_field(fields, "id", str, DERENDER_PATH) or ""
    return raw("chatcmpl-" + completion_id.removeprefix("generate-tokens-").removeprefix("chatcmpl-"))


def _chat_logprobs(logprobs: _Logprobs, top: int) -> dict[str, Any]:
    """Log-probabilities as the chat route returns them, with `top` alternatives each; negative: with all."""
    content = []
    for entry in logprobs.content or []:
        # generate returns one alternative even if none is requested
        alternatives = entry.top_logprobs if top < 0 else entry.top_logprobs[:top]
        content.append({**_entry(entry), "top_logprobs": [_entry(token) for token in alternatives]})
    return {"content": None if logprobs.content is None else content}


def _entry(entry: _Logprob) -> dict[str, Any]:
    token = entry.token if entry.token is not None else f"token_id:{entry.token_id}"
    return {"token": token, "logprob": entry.logprob, "bytes": entry.bytes}


def _without_nulls(value: Any) -> Any:
    """Remove null members from a JSON value, at all depths: the chat route's chunks have none."""
    if isinstance(value, dict):
        return {name: _without_nulls(member) for name, member in value.items() if member is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
