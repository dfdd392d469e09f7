"""Convert responses of vLLM's generate route into chat completions, as vLLM's chat route returns them.

`/derender` parses the message: text, tool calls, reasoning. Everything else is copied from the generate
response, because derender drops or changes it: ids, log-probabilities, usage, finish reasons.

Differences from the chat route: there is no `system_fingerprint`; `usage` counts neither reasoning tokens
nor tokens written to the cache; special tokens inside a text are shown if a parser is configured; members
of a delta are never null; hidden reasoning (`include_reasoning: false`) does not hide its ids.

A log-probability names its token by its text, or as `token_id:N` if the client requests that
(`return_tokens_as_token_ids`), or if the generate route does not support `output_mode`.
"""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

import msgspec

from chat_tokenizer import ids
from tokenproxy.base.errors import BadRequest, EngineBroken
from tokenproxy.base.evidence import EVIDENCE
from tokenproxy.base.fields import NULL, join, parse, raw, raw_value, read
from tokenproxy.base.http import JSON_HEADERS, BytesResponse, Request, Response
from tokenproxy.base.types import Fields, Headers
from tokenproxy.engine.protocol import Engine, TokenRequest, fetch
from tokenproxy.engine.sse import DONE, data_event, events

T = TypeVar("T")

GENERATE_PATH = "/inference/v1/generate"
DERENDER_PATH = "/v1/chat/completions/derender"
_NULL = msgspec.Raw(NULL)
_STOP = b'"stop"'
_ABORT = b'"abort"'
_COMMON_FIELDS = ("id", "object", "created", "model")
"""Fields that are equal in all chunks of a stream."""
_PLACEHOLDER_IDS = [0]
"""Sent for a choice with no text: derender rejects an empty list. The parsed result is discarded."""


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
        self._headers = request.headers
        self._prompt = msgspec.Raw(request.prompt_ids)
        self._prompt_tokens = ids.check(request.prompt_ids)
        self._has_images = bool(request.images)
        self._before = request.sampled
        self._chat = msgspec.Raw(join(chat))
        self._model = fields.get("model", _NULL)
        self._choices = max(1, read(fields, "n", int) or 1)
        self._with_ids = read(fields, "return_token_ids", bool) or False
        self._with_stop = read(fields, "include_stop_str_in_output", bool) or False
        self._with_special = raw_value(sampling, "skip_special_tokens") == b"false"
        self._top_logprobs = read(fields, "top_logprobs", int) or 0
        self._tool_choice = raw_value(fields, "tool_choice")
        self._single_tool_call = raw_value(fields, "parallel_tool_calls") == b"false"
        options = read(fields, "stream_options", Fields) or {}
        self._running_usage = all(
            read(options, name, bool) for name in ("include_usage", "continuous_usage_stats")
        )
        self._common: Fields = {}
        self._null_prompt_text: Fields = {}
        self._parser_states: dict[int, msgspec.Raw] = {}
        self._sampled: Counter[int] = Counter()

    async def whole(self, body: bytes, headers: Headers) -> Response:
        """Convert a generate response that is not a stream into a chat completion.

        Raises:
            EngineBroken: a response of generate or derender is malformed.
        """
        generated = parse_response(body, GENERATE_PATH)
        sampled = _choices(generated, GENERATE_PATH)
        text_ids = [[*self._before, *self._text_ids(choice)] for choice in sampled]
        inputs = [
            _derender_input(choice, tokens or _PLACEHOLDER_IDS)
            for choice, tokens in zip(sampled, text_ids, strict=True)
        ]
        response = {**generated, "choices": raw(inputs)}
        for name in ("output_mode", "prompt_token_ids", "mm_placeholders"):
            response.pop(name, None)
        status, completion = await self._derender({"generate_response": msgspec.Raw(join(response))})
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
        completion["choices"] = raw(choices)
        completion["prompt_token_ids"] = self._echo(generated)
        return BytesResponse(200, error_headers(headers), join(completion))

    async def begin(self, sampled: Sequence[int]) -> dict[str, Any]:
        """Parse ids that were sampled before the stream begins. Returns the delta that they give.

        Raises:
            EngineBroken: a response of derender is malformed.
        """
        source: Fields = {"index": raw(0), "token_ids": raw(sampled), "finish_reason": _NULL}
        parsed = await self._derender_choice({}, source)
        self._sampled.clear()
        return read_response_field(parsed, "delta", dict[str, Any], DERENDER_PATH) or {}

    async def stream(self, response: Response) -> AsyncIterator[bytes]:
        """Convert a stream of the generate route into the stream of a chat completion.

        Raises:
            EngineBroken: a response of generate or derender is malformed.
        """
        async for data in events(response.chunks()):
            if data == DONE:
                yield data_event(DONE)
                continue
            event = parse_response(data, GENERATE_PATH)
            if "error" in event:
                yield b"data: " + data + b"\n\n"
                continue
            for choice in _choices(event, GENERATE_PATH):
                for chunk in await self._chunks(event, choice):
                    yield b"data: " + join(chunk) + b"\n\n"
            if raw_value(event, "choices") == b"[]" and raw_value(event, "usage") is not None:
                if not self._common:
                    await self._derender_choice(event, None)
                usage = _without_nulls(read_response_field(event, "usage", dict[str, Any], GENERATE_PATH))
                yield b"data: " + join({**self._common, "choices": raw([]), "usage": raw(usage)}) + b"\n\n"

    async def _chunks(self, event: Fields, source: Fields) -> list[Fields]:
        """Convert one choice of one event. The first event also gives every choice a chunk with the role."""
        is_first_event, index = not self._common, _index(source)
        parsed = await self._derender_choice(event, source)
        chunks = (
            [self._role_chunk(event, number) for number in range(self._choices)] if is_first_event else []
        )
        delta = _without_nulls(read_response_field(parsed, "delta", dict[str, Any], DERENDER_PATH) or {})
        delta.pop("role", None)
        choice: Fields = {"index": raw(index), "delta": raw(delta)}
        reason = source.get("finish_reason", _NULL)
        # derender returns "tool_calls" even for a call that max_tokens cut short; the chat route, "length"
        choice["finish_reason"] = parsed.get("finish_reason", _NULL) if bytes(reason) == _STOP else reason
        if bytes(reason) != NULL:
            choice["stop_reason"] = source.get("stop_reason", _NULL)
        self._copy_token_fields(choice, source)
        if delta or bytes(reason) != NULL or self._with_ids or raw_value(choice, "logprobs") is not None:
            chunks.append(self._chunk(event, choice, self._sampled[index]))
        return chunks

    def _role_chunk(self, event: Fields, index: int) -> Fields:
        """The first chunk of a choice, as the chat route sends it: the role, and the prompt's ids."""
        delta = raw({"role": "assistant", "content": ""})
        choice: Fields = {"index": raw(index), "delta": delta, "logprobs": _NULL, "finish_reason": _NULL}
        chunk = self._chunk(event, choice, None)
        return {**chunk, "prompt_token_ids": self._echo(event), **self._null_prompt_text}

    def _echo(self, generated: Fields) -> msgspec.Raw:
        """The prompt for the client: as the engine returns it if it expanded images in it."""
        if not self._with_ids:
            return _NULL
        return generated.get("prompt_token_ids", self._prompt) if self._has_images else self._prompt

    def _chunk(self, event: Fields, choice: Fields, sampled: int | None) -> Fields:
        """A chunk with one choice. `sampled` counts its tokens so far, for `usage`; None before the first."""
        chunk = {**self._common, "choices": raw([choice])}
        if self._running_usage:
            reported = read_response_field(event, "usage", dict[str, Any], GENERATE_PATH) or {}
            prompt = reported.get("prompt_tokens", self._prompt_tokens)
            completion = 0 if sampled is None else reported.get("completion_tokens", sampled)
            usage = {"prompt_tokens": prompt, "completion_tokens": completion}
            usage |= {"total_tokens": prompt + completion, "completion_tokens_details": None}
            chunk["usage"] = raw(usage)
        return chunk

    async def _derender_choice(self, event: Fields, source: Fields | None) -> Fields:
        """Let derender parse one choice of an event; without a choice, it returns only the common fields."""
        index = 0 if source is None else _index(source)
        inputs = [] if source is None else [_derender_input(source, self._text_ids(source))]
        event_of_choice = {"request_id": event.get("request_id", raw("")), "choices": raw(inputs)}
        fields: Fields = {"stream": raw(True), "generate_chunk": msgspec.Raw(join(event_of_choice))}
        # derender keeps no state: it returns the parser's state, and gets it back with the next chunk
        if index in self._parser_states:
            fields["stream_state"] = self._parser_states[index]
        status, derendered = await self._derender(fields)
        if status != 200:
            error = join(derendered).decode("utf-8", "replace")[:300]
            raise EngineBroken(f"{DERENDER_PATH} returned status {status}: {error}")
        if "chunk" not in derendered or "stream_state" not in derendered:
            raise EngineBroken(f"{DERENDER_PATH} returned no `chunk` or no `stream_state`")
        chunk = parse_response(bytes(derendered["chunk"]), DERENDER_PATH)
        if not self._common:
            self._common = {
                **{name: chunk[name] for name in _COMMON_FIELDS if name in chunk},
                "id": _chat_id(chunk),
            }
            self._null_prompt_text = {name: _NULL for name in ("prompt_text",) if name in chunk}
        parsed = _choices(chunk, DERENDER_PATH)
        if len(parsed) != len(inputs):
            raise EngineBroken(f"{DERENDER_PATH} returned {len(parsed)} choices for {len(inputs)}")
        if source is None:
            return {}
        self._parser_states[index] = derendered["stream_state"]
        self._sampled[index] += len(_tokens(source))
        return parsed[0]

    def _text_ids(self, choice: Fields) -> list[int]:
        """The ids to decode the message's text from: without the stop token, unless the client requests it.

        `[74, 75, 2]` with `finish_reason: "stop"` gives `[74, 75]`. Stop strings are refused here, so "stop"
        always means that the last id is the stop token.
        """
        tokens = _tokens(choice)
        # no stop_reason: the stop token is the model's end of turn, which is a special token
        shown = self._with_stop and (self._with_special or raw_value(choice, "stop_reason") is not None)
        return tokens[:-1] if raw_value(choice, "finish_reason") == _STOP and not shown else tokens

    def _rewrite_choice(self, choice: Fields, source: Fields, *, has_text: bool) -> None:
        """Change a choice of derender in place to what the chat route returns."""
        message = read_response_field(choice, "message", Fields, DERENDER_PATH) or {}
        calls = read_response_field(message, "tool_calls", list[msgspec.Raw], DERENDER_PATH) or []
        if not has_text:
            calls = []
            message = {name: _NULL for name in message if name != "tool_calls"}
            message |= {"role": raw("assistant"), "content": raw("")}
        elif calls and self._single_tool_call:
            message["tool_calls"] = raw(calls[:1])
        reason = source.get("finish_reason", _NULL)
        # the chat route's rule: required calls that were cut short keep "length", automatic ones do not. But
        # an abort stays one here: the rest may hold another call
        if self._tool_choice == b'"required"':
            ends_with_calls = bytes(reason) == _STOP
        else:
            automatic = self._tool_choice in (None, b'"auto"') and bytes(reason) != _ABORT
            ends_with_calls = bool(calls) and automatic
        choice["message"] = msgspec.Raw(join(message))
        choice["finish_reason"] = raw("tool_calls") if ends_with_calls else reason
        choice["stop_reason"] = source.get("stop_reason", _NULL)
        self._copy_token_fields(choice, source)

    def _copy_token_fields(self, choice: Fields, source: Fields) -> None:
        """Copy ids, log-probabilities and what else belongs to each id from the generate response."""
        choice["token_ids"] = source.get("token_ids", _NULL) if self._with_ids else _NULL
        logprobs = read_response_field(source, "logprobs", _Logprobs, GENERATE_PATH)
        choice["logprobs"] = _NULL if logprobs is None else raw(_chat_logprobs(logprobs, self._top_logprobs))
        for fact in EVIDENCE:
            if raw_value(source, fact.name) is not None:
                choice[fact.name] = source[fact.name]

    async def _derender(self, fields: Fields) -> tuple[int, Fields]:
        """Send a derender request; returns its status and the response's fields."""
        fields = {
            **fields,
            "model": self._model,
            "prompt_tokens": raw(self._prompt_tokens),
            "prompt_token_ids": self._prompt,
            "chat_request": self._chat,
        }
        request = Request("POST", DERENDER_PATH, self._headers, join(fields), repeatable=True)
        status, body = await fetch(self._engine, request)
        return status, parse_response(body, DERENDER_PATH)


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


def error_headers(headers: Headers) -> Headers:
    """The headers that stay valid after the body was replaced by other JSON."""
    return [
        pair for pair in headers if pair[0] not in (b"content-length", b"content-encoding", b"content-type")
    ] + [(b"content-type", b"application/json")]


def _choices(fields: Fields, path: str) -> list[Fields]:
    return read_response_field(fields, "choices", list[Fields], path) or []


def _index(choice: Fields) -> int:
    return read_response_field(choice, "index", int, GENERATE_PATH) or 0


def _tokens(choice: Fields) -> list[int]:
    return read_response_field(choice, "token_ids", list[int], GENERATE_PATH) or []


def _derender_input(choice: Fields, tokens: list[int]) -> Fields:
    """A choice of a generate response, reduced to the fields that derender reads."""
    kept: Fields = {
        name: choice[name] for name in ("index", "finish_reason", "stop_reason") if name in choice
    }
    return {**kept, "token_ids": raw(tokens)}


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
