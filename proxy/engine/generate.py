"""Exact prompts for engines whose chat route takes no ids: generate, then derender.

vLLM's scale-out routes (`--enable-scale-out`) do the steps of a chat completion one by one: `/render`
resolves sampling parameters and grammar, `/inference/v1/generate` runs on ids, `/derender` parses tools and
reasoning. The proxy puts the exact ids between the first and the second step. It costs two more round
trips, and in a stream one for every chunk, so it is the second choice.
"""

from collections.abc import AsyncIterator
from typing import Any, ClassVar

import msgspec

from proxy.engine.protocol import JSON_HEADERS, Answer, BytesAnswer, Call, Engine, StreamAnswer
from proxy.engine.sse import events
from proxy.engine.token_in import TokenRequest, error_headers, named_errors
from proxy.errors import BadRequest, EngineBroken
from proxy.fields import NULL, given, join, parse, raw, read
from proxy.types import Fields, Headers
from tokenization import ids

RENDER_PATH = "/v1/chat/completions/render"
GENERATE_PATH = "/inference/v1/generate"
DERENDER_PATH = "/v1/chat/completions/derender"
_STAND_IN = msgspec.Raw(b'[{"role":"user","content":"."}]')
"""Rendered only to resolve the parameters; its ids are thrown away."""


class GenerateTokenIn:
    """vLLM's generate route between its render and derender routes."""

    name: ClassVar[str] = "generate"

    def takes(self, fields: Fields) -> bool:
        """See `TokenIn.takes`: no stop strings, behind which derender decodes the text again."""
        return given(fields, "stop") in (None, b"[]", b'""')

    async def complete(self, engine: Engine, request: TokenRequest) -> Answer:
        """See `TokenIn.complete`. Stop strings are refused: derender decodes the text behind them again."""
        if not self.takes(request.fields):
            raise BadRequest(
                "`stop` strings need an engine whose chat route takes `kv_transfer_params.prompt_token_ids`; "
                "use `stop_token_ids`, or upgrade vLLM",
                param="stop",
            )
        chat = dict(request.fields)
        chat.setdefault("messages", _STAND_IN)
        derender, stream = _Derender(engine, request, chat), read(request.fields, "stream", bool)
        rendered = await self._render(engine, chat, request)
        if isinstance(rendered, BytesAnswer):
            return rendered
        rendered["token_ids"] = msgspec.Raw(request.prompt_ids)
        # resolved from the stand-in prompt; null makes the engine look at the real one
        rendered["reasoning_ended"] = msgspec.Raw(NULL)
        answer = await engine.send(Call("POST", GENERATE_PATH, _json(request.headers), join(rendered), True))
        if answer.status >= 400:
            return await named_errors(answer, request.field)
        if stream:
            return StreamAnswer(200, list(answer.headers), derender.stream(answer), answer)
        try:
            body = await answer.read()
        finally:
            await answer.aclose()
        return await derender.whole(body, answer.headers)

    async def _render(self, engine: Engine, chat: Fields, request: TokenRequest) -> Fields | BytesAnswer:
        body = join({**chat, "messages": _STAND_IN})
        answer = await engine.send(Call("POST", RENDER_PATH, _json(request.headers), body, True))
        answer = await named_errors(answer, request.field)
        try:
            content = await answer.read()
        finally:
            await answer.aclose()
        if answer.status >= 400:
            return BytesAnswer(answer.status, answer.headers, content)
        return _from_engine(content, RENDER_PATH)


class _Derender:
    """Turns what generate answers into chat completions, with the ids it answered kept beside the text."""

    def __init__(self, engine: Engine, request: TokenRequest, chat: Fields) -> None:
        self._engine = engine
        self._headers = _json(request.headers)
        self._prompt = msgspec.Raw(request.prompt_ids)
        self._prompt_tokens = ids.check(request.prompt_ids)
        self._chat = msgspec.Raw(join(chat))
        self._model = request.fields.get("model", msgspec.Raw(NULL))
        self._with_ids = read(request.fields, "return_token_ids", bool) or False
        self._states: dict[int, msgspec.Raw] = {}
        self._prompt_sent = False

    async def whole(self, body: bytes, headers: Headers) -> Answer:
        """A chat completion out of one whole response of generate."""
        generated = _from_engine(body, GENERATE_PATH)
        fields = {"generate_response": msgspec.Raw(body)}
        status, completion = await self._ask(fields)
        if status != 200:
            return BytesAnswer(status, list(JSON_HEADERS), join(completion))
        _restore_id(completion)
        if "usage" in generated:
            completion["usage"] = generated["usage"]
        sampled = _choices(generated, GENERATE_PATH)
        choices = _choices(completion, DERENDER_PATH)
        if len(choices) != len(sampled):
            raise EngineBroken(f"{DERENDER_PATH} answered {len(choices)} choices for {len(sampled)}")
        for choice, source in zip(choices, sampled, strict=True):
            self._finish(choice, source, "message")
        completion["choices"] = raw(choices)
        completion["prompt_token_ids"] = self._prompt if self._with_ids else msgspec.Raw(NULL)
        return BytesAnswer(200, error_headers(headers), join(completion))

    async def stream(self, answer: Answer) -> AsyncIterator[bytes]:
        """Chunks of a chat completion out of the events of generate."""
        async for data in events(answer.chunks()):
            if data == b"[DONE]":
                yield b"data: [DONE]\n\n"
                continue
            event = _from_engine(data, GENERATE_PATH)
            if "error" in event:
                yield b"data: " + data + b"\n\n"
                continue
            choices = _choices(event, GENERATE_PATH)
            if not choices:
                yield b"data: " + await self._chunk(event, None) + b"\n\n"
            for choice in choices:
                yield b"data: " + await self._chunk(event, choice) + b"\n\n"

    async def _chunk(self, event: Fields, choice: Fields | None) -> bytes:
        index = read(choice, "index", int) or 0 if choice is not None else 0
        one = {**event, "choices": raw([] if choice is None else [choice])}
        fields: Fields = {"stream": msgspec.Raw(b"true"), "generate_chunk": msgspec.Raw(join(one))}
        if index in self._states:
            fields["stream_state"] = self._states[index]
        status, derendered = await self._ask(fields)
        if status != 200:
            raise EngineBroken(
                f"derender answered {status}: {join(derendered).decode('utf-8', 'replace')[:300]}"
            )
        if "chunk" not in derendered or "stream_state" not in derendered:
            raise EngineBroken(f"{DERENDER_PATH} answered without a chunk")
        self._states[index] = derendered["stream_state"]
        chunk = _from_engine(bytes(derendered["chunk"]), DERENDER_PATH)
        _restore_id(chunk)
        if choice is None and given(event, "usage") is not None:
            chunk["usage"] = event["usage"]
        made = _choices(chunk, DERENDER_PATH)
        if choice is not None and made:
            self._finish(made[0], choice, "delta")
            chunk["choices"] = raw(made)
        if self._with_ids and not self._prompt_sent:
            chunk["prompt_token_ids"] = self._prompt
        self._prompt_sent = True
        return join(chunk)

    def _finish(self, choice: Fields, source: Fields, text: str) -> None:
        """Put generate's own ids and spans beside the parsed text."""
        choice["token_ids"] = (
            source.get("token_ids", msgspec.Raw(NULL)) if self._with_ids else msgspec.Raw(NULL)
        )
        for name in ("weight_versions", "routed_experts"):
            if given(source, name) is not None:
                choice[name] = source[name]
        message: dict[str, Any] = read(choice, text, dict[str, Any]) or {}
        if message.get("tool_calls") and given(choice, "finish_reason") == b'"stop"' and self._auto_tools():
            choice["finish_reason"] = msgspec.Raw(b'"tool_calls"')

    def _auto_tools(self) -> bool:
        return given(parse(bytes(self._chat)), "tool_choice") in (None, b'"auto"', b'"required"')

    async def _ask(self, fields: Fields) -> tuple[int, Fields]:
        fields = {
            **fields,
            "model": self._model,
            "prompt_tokens": raw(self._prompt_tokens),
            "prompt_token_ids": self._prompt,
            "chat_request": self._chat,
        }
        answer = await self._engine.send(Call("POST", DERENDER_PATH, self._headers, join(fields), True))
        try:
            return answer.status, _from_engine(await answer.read(), DERENDER_PATH)
        finally:
            await answer.aclose()


def _from_engine(body: bytes, path: str) -> Fields:
    """The fields of an answer; what the engine answers is never the client's fault."""
    try:
        return parse(body)
    except BadRequest as error:
        raise EngineBroken(f"{path} answered something that is no JSON object") from error


def _choices(answer: Fields, path: str) -> list[Fields]:
    """The choices of an answer of the engine."""
    try:
        return read(answer, "choices", list[Fields]) or []
    except BadRequest as error:
        raise EngineBroken(f"{path} answered choices that are no list of objects") from error


def _restore_id(completion: Fields) -> None:
    """Take off what the generate route puts before the id that render gave."""
    identity = read(completion, "id", str) or ""
    completion["id"] = raw(identity.removeprefix("generate-tokens-"))


def _json(headers: Headers) -> Headers:
    """The client's headers, asking for bytes that can be read here."""
    return [pair for pair in headers if pair[0] != b"accept-encoding"]
