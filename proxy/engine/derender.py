"""Chat completions out of what vLLM's generate route answers, as its chat route would have answered them.

`/derender` makes the message: text, tool calls, reasoning. All else is taken from generate itself, because
derender drops or changes it: ids, log-probabilities, usage, how a choice ended. Some things differ from the
chat route: there is no `system_fingerprint`, `usage` counts neither reasoning tokens nor those written to
the cache, special tokens in the middle of a text are shown where a parser is configured, members of a delta
are never null, and hidden reasoning (`include_reasoning: false`) does not hide its ids.

The token of a log-probability is its text. It is `token_id:N` where the client asks for that
(`return_tokens_as_token_ids`), and where generate knows no `output_mode`.
"""

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import msgspec

from proxy.engine.protocol import Engine
from proxy.engine.sse import events
from proxy.engine.token_in import TokenRequest, error_headers
from proxy.errors import BadRequest, EngineBroken
from proxy.fields import NULL, given, join, parse, raw, read
from proxy.http import JSON_HEADERS, BytesResponse, Request, Response
from proxy.types import Fields, Headers
from tokenization import ids

T = TypeVar("T")

GENERATE_PATH = "/inference/v1/generate"
DERENDER_PATH = "/v1/chat/completions/derender"
_NULL = msgspec.Raw(NULL)
_STOP = b'"stop"'
_FIXED = ("id", "object", "created", "model")
"""What all chunks of a stream have in common."""
_ANY_IDS = [0]
"""derender refuses a whole choice without ids; what it makes of these is thrown away."""


class _Logprob(msgspec.Struct):
    """One token in any of the shapes that generate has for it."""

    logprob: float = -9999.0
    token: str | None = None
    token_id: int | None = None
    bytes: list[int] | None = None
    top_logprobs: list["_Logprob"] = []


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class Derender:
    """The answer to one request."""

    def __init__(self, engine: Engine, request: TokenRequest, chat: Fields, sampling: Fields) -> None:
        """`chat` is the request with its messages, for parsers; `sampling` is what render made of it."""
        fields = request.fields
        self._engine = engine
        self._headers = json_headers(request.headers)
        self._prompt = msgspec.Raw(request.prompt_ids)
        self._prompt_tokens = ids.check(request.prompt_ids)
        self._chat = msgspec.Raw(join(chat))
        self._model = fields.get("model", _NULL)
        self._choices = max(1, read(fields, "n", int) or 1)
        self._with_ids = read(fields, "return_token_ids", bool) or False
        self._with_stop = read(fields, "include_stop_str_in_output", bool) or False
        self._with_special = given(sampling, "skip_special_tokens") == b"false"
        self._top_logprobs = read(fields, "top_logprobs", int) or 0
        self._tool_choice = given(fields, "tool_choice")
        self._one_call = given(fields, "parallel_tool_calls") == b"false"
        options = read(fields, "stream_options", Fields) or {}
        self._running_usage = all(
            read(options, name, bool) for name in ("include_usage", "continuous_usage_stats")
        )
        self._fixed: Fields = {}
        self._no_text: Fields = {}
        self._states: dict[int, msgspec.Raw] = {}
        self._sampled: Counter[int] = Counter()

    async def whole(self, body: bytes, headers: Headers) -> Response:
        """A chat completion out of one whole response of generate.

        Raises:
            EngineBroken: generate or derender answered nonsense.
        """
        generated = from_engine(body, GENERATE_PATH)
        sampled = _choices(generated, GENERATE_PATH)
        spoken = [self._spoken(choice) for choice in sampled]
        parts = [_part(one, tokens or _ANY_IDS) for one, tokens in zip(sampled, spoken, strict=True)]
        response = {**generated, "choices": raw(parts)}
        response.pop("output_mode", None)
        status, completion = await self._ask({"generate_response": msgspec.Raw(join(response))})
        if status != 200:
            return BytesResponse(status, list(JSON_HEADERS), join(completion))
        completion["id"] = _chat_id(completion)
        for name in ("usage", "created"):
            if given(generated, name) is not None:
                completion[name] = generated[name]
        choices = _choices(completion, DERENDER_PATH)
        if len(choices) != len(sampled):
            raise EngineBroken(f"{DERENDER_PATH} answered {len(choices)} choices for {len(sampled)}")
        for choice, source, tokens in zip(choices, sampled, spoken, strict=True):
            self._complete(choice, source, said=bool(tokens))
        completion["choices"] = raw(choices)
        completion["prompt_token_ids"] = self._prompt if self._with_ids else _NULL
        return BytesResponse(200, error_headers(headers), join(completion))

    async def stream(self, answer: Response) -> AsyncIterator[bytes]:
        """Chunks of a chat completion out of the events of generate.

        Raises:
            EngineBroken: generate or derender answered nonsense.
        """
        async for data in events(answer.chunks()):
            if data == b"[DONE]":
                yield b"data: [DONE]\n\n"
                continue
            event = from_engine(data, GENERATE_PATH)
            if "error" in event:
                yield b"data: " + data + b"\n\n"
                continue
            for choice in _choices(event, GENERATE_PATH):
                for chunk in await self._chunks(event, choice):
                    yield b"data: " + join(chunk) + b"\n\n"
            if given(event, "choices") == b"[]" and given(event, "usage") is not None:
                if not self._fixed:
                    await self._derendered(event, None)
                usage = _without_nulls(of_engine(event, "usage", dict[str, Any], GENERATE_PATH))
                yield b"data: " + join({**self._fixed, "choices": raw([]), "usage": raw(usage)}) + b"\n\n"

    async def _chunks(self, event: Fields, source: Fields) -> list[Fields]:
        """The chunks of one event of one choice; before the first one, those with the roles."""
        first, index = not self._fixed, _index(source)
        made = await self._derendered(event, source)
        chunks = [self._head(event, number) for number in range(self._choices)] if first else []
        delta = _without_nulls(of_engine(made, "delta", dict[str, Any], DERENDER_PATH) or {})
        delta.pop("role", None)
        choice: Fields = {"index": raw(index), "delta": raw(delta)}
        ended = source.get("finish_reason", _NULL)
        # derender also says "tool_calls" where calls were cut short
        choice["finish_reason"] = made.get("finish_reason", _NULL) if bytes(ended) == _STOP else ended
        if bytes(ended) != NULL:
            choice["stop_reason"] = source.get("stop_reason", _NULL)
        self._put_evidence(choice, source)
        if delta or bytes(ended) != NULL or self._with_ids or given(choice, "logprobs") is not None:
            chunks.append(self._chunk(event, choice, self._sampled[index]))
        return chunks

    def _head(self, event: Fields, index: int) -> Fields:
        delta = raw({"role": "assistant", "content": ""})
        choice: Fields = {"index": raw(index), "delta": delta, "logprobs": _NULL, "finish_reason": _NULL}
        chunk = self._chunk(event, choice, None)
        prompt = self._prompt if self._with_ids else _NULL
        return {**chunk, "prompt_token_ids": prompt, **self._no_text}

    def _chunk(self, event: Fields, choice: Fields, sampled: int | None) -> Fields:
        """A chunk with one choice, and with how many tokens it had so far; None for one before all tokens."""
        chunk = {**self._fixed, "choices": raw([choice])}
        if self._running_usage:
            said = of_engine(event, "usage", dict[str, Any], GENERATE_PATH) or {}
            prompt = said.get("prompt_tokens", self._prompt_tokens)
            completion = 0 if sampled is None else said.get("completion_tokens", sampled)
            usage = {"prompt_tokens": prompt, "completion_tokens": completion}
            usage |= {"total_tokens": prompt + completion, "completion_tokens_details": None}
            chunk["usage"] = raw(usage)
        return chunk

    async def _derendered(self, event: Fields, source: Fields | None) -> Fields:
        """What derender makes of one choice of an event; nothing if there is none."""
        index = 0 if source is None else _index(source)
        parts = [] if source is None else [_part(source, self._spoken(source))]
        one = {"request_id": event.get("request_id", raw("")), "choices": raw(parts)}
        fields: Fields = {"stream": raw(True), "generate_chunk": msgspec.Raw(join(one))}
        if index in self._states:
            fields["stream_state"] = self._states[index]
        status, answer = await self._ask(fields)
        if status != 200:
            said = join(answer).decode("utf-8", "replace")[:300]
            raise EngineBroken(f"derender answered {status}: {said}")
        if "chunk" not in answer or "stream_state" not in answer:
            raise EngineBroken(f"{DERENDER_PATH} answered without a chunk")
        chunk = from_engine(bytes(answer["chunk"]), DERENDER_PATH)
        if not self._fixed:
            self._fixed = {**{name: chunk[name] for name in _FIXED if name in chunk}, "id": _chat_id(chunk)}
            self._no_text = {name: _NULL for name in ("prompt_text",) if name in chunk}
        made = _choices(chunk, DERENDER_PATH)
        if len(made) != len(parts):
            raise EngineBroken(f"{DERENDER_PATH} answered {len(made)} choices for {len(parts)}")
        if source is None:
            return {}
        self._states[index] = answer["stream_state"]
        self._sampled[index] += len(_tokens(source))
        return made[0]

    def _spoken(self, choice: Fields) -> list[int]:
        """The ids that are text. With no stop strings, a choice that says "stop" ends with its stop token."""
        tokens = _tokens(choice)
        # no stop reason: the model's own end of a turn, which is a special token
        shown = self._with_stop and (self._with_special or given(choice, "stop_reason") is not None)
        return tokens[:-1] if given(choice, "finish_reason") == _STOP and not shown else tokens

    def _complete(self, choice: Fields, source: Fields, *, said: bool) -> None:
        """Make a whole choice of derender's the chat route's."""
        message = of_engine(choice, "message", Fields, DERENDER_PATH) or {}
        calls = of_engine(message, "tool_calls", list[msgspec.Raw], DERENDER_PATH) or []
        if not said:
            calls = []
            message = {name: _NULL for name in message if name != "tool_calls"}
            message |= {"role": raw("assistant"), "content": raw("")}
        elif calls and self._one_call:
            message["tool_calls"] = raw(calls[:1])
        ended = source.get("finish_reason", _NULL)
        if self._tool_choice == b'"required"':
            called = bytes(ended) == _STOP
        else:
            called = bool(calls) and self._tool_choice in (None, b'"auto"')
        choice["message"] = msgspec.Raw(join(message))
        choice["finish_reason"] = raw("tool_calls") if called else ended
        choice["stop_reason"] = source.get("stop_reason", _NULL)
        self._put_evidence(choice, source)

    def _put_evidence(self, choice: Fields, source: Fields) -> None:
        """Put generate's own ids, log-probabilities and spans beside the parsed message."""
        choice["token_ids"] = source.get("token_ids", _NULL) if self._with_ids else _NULL
        logprobs = of_engine(source, "logprobs", _Logprobs, GENERATE_PATH)
        choice["logprobs"] = _NULL if logprobs is None else raw(_as_chat(logprobs, self._top_logprobs))
        for name in ("weight_versions", "routed_experts"):
            if given(source, name) is not None:
                choice[name] = source[name]

    async def _ask(self, fields: Fields) -> tuple[int, Fields]:
        fields = {
            **fields,
            "model": self._model,
            "prompt_tokens": raw(self._prompt_tokens),
            "prompt_token_ids": self._prompt,
            "chat_request": self._chat,
        }
        answer = await self._engine.send(Request("POST", DERENDER_PATH, self._headers, join(fields), True))
        try:
            return answer.status, from_engine(await answer.read(), DERENDER_PATH)
        finally:
            await answer.aclose()


def from_engine(body: bytes, path: str) -> Fields:
    """The fields of an answer; what the engine answers is never the client's fault.

    Raises:
        EngineBroken: it is no JSON object.
    """
    try:
        return parse(body)
    except BadRequest as error:
        raise EngineBroken(f"{path} answered something that is no JSON object") from error


def of_engine(answer: Fields, name: str, kind: type[T], path: str) -> T | None:
    """A field of an answer, or None where it is missing or null.

    Raises:
        EngineBroken: it holds something else.
    """
    try:
        return read(answer, name, kind)
    except BadRequest as error:
        raise EngineBroken(f"{path} answered a `{name}` that cannot be read: {error}") from error


def json_headers(headers: Headers) -> Headers:
    """The client's headers, asking for bytes that can be read here."""
    return [pair for pair in headers if pair[0] != b"accept-encoding"]


def _choices(answer: Fields, path: str) -> list[Fields]:
    return of_engine(answer, "choices", list[Fields], path) or []


def _index(choice: Fields) -> int:
    return of_engine(choice, "index", int, GENERATE_PATH) or 0


def _tokens(choice: Fields) -> list[int]:
    return of_engine(choice, "token_ids", list[int], GENERATE_PATH) or []


def _part(choice: Fields, tokens: list[int]) -> Fields:
    """What derender needs of a choice of generate."""
    kept: Fields = {
        name: choice[name] for name in ("index", "finish_reason", "stop_reason") if name in choice
    }
    return {**kept, "token_ids": raw(tokens)}


def _chat_id(answer: Fields) -> msgspec.Raw:
    """The id as the chat route spells it; the generate route puts its own word before it."""
    identity = of_engine(answer, "id", str, DERENDER_PATH) or ""
    return raw("chatcmpl-" + identity.removeprefix("generate-tokens-").removeprefix("chatcmpl-"))


def _as_chat(logprobs: _Logprobs, top: int) -> dict[str, Any]:
    """Log-probabilities in the shape of the chat route; generate adds one alternative where none is asked."""
    content = []
    for entry in logprobs.content or []:
        others = entry.top_logprobs if top < 0 else entry.top_logprobs[:top]
        content.append({**_entry(entry), "top_logprobs": [_entry(other) for other in others]})
    return {"content": None if logprobs.content is None else content}


def _entry(entry: _Logprob) -> dict[str, Any]:
    token = entry.token if entry.token is not None else f"token_id:{entry.token_id}"
    return {"token": token, "logprob": entry.logprob, "bytes": entry.bytes}


def _without_nulls(value: Any) -> Any:
    """A JSON value with no null members: chunks of the chat route have none where nothing is to be said."""
    if isinstance(value, dict):
        return {name: _without_nulls(member) for name, member in value.items() if member is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
