"""What a client gets of a turn, written from what was read of the engine's response for the record.

`Redactor` writes the engine's own format. The proxy always requests ids, log-probabilities and usage from the
engine. A client that requested them too gets the engine's own bytes; for other clients these fields are null,
and chunks that hold nothing else are not sent. `tokenproxy.formats.translated` writes other formats.
"""

import logging
import re
import time
from abc import ABC, abstractmethod
from itertools import islice
from typing import Any

import msgspec

from tokenproxy.base.errors import ApiError
from tokenproxy.base.fields import NULL, is_null, raw, raw_value
from tokenproxy.base.http import EVENT_HEADERS, JSON_HEADERS, BytesResponse, Response, StreamResponse
from tokenproxy.base.request import ChatRequest, EngineRoute, GivenIds, Visible
from tokenproxy.base.types import Fields
from tokenproxy.engine.sse import DONE, data_event, event_data, replace_data
from tokenproxy.record.completion import Completion
from tokenproxy.record.turn import new_id
from tokenproxy.turn import parsing
from tokenproxy.turn.parsing import LOGPROBS_MARK, Parsed
from tokenproxy.turn.required_prefix import with_ids
from tokenproxy.turn.wire import REFUSALS, UsualChunk, calls_of

log = logging.getLogger("tokenproxy")

_NULL = msgspec.Raw(NULL)
_PROMPT = "prompt_token_ids"
_IDS_IN_CHOICE = {
    EngineRoute.CHAT: ("token_ids",),
    EngineRoute.COMPLETIONS: ("token_ids", _PROMPT),
    EngineRoute.GENERATE: (),
}
"""The fields of a choice that hold ids which clients may request; generate always returns the sampled ids."""
_WEIGHTS, _QUOTED_WEIGHTS = "weight_versions", b'"weight_versions"'
_OF_PROMPT = (_PROMPT, "mm_placeholders")
"""Fields of a response of generate that `return_token_ids` requests."""
_TOKEN_ID, _TOKEN = re.compile(rb'"token_id":\s*(\d+)'), re.compile(rb'"token":\s*"token_id:(\d+)"')
_BOTH = rb'"token":"token_id:\1","token_id":\1'
_MOST_CHOICES = 4096
"""Of a final answer: no engine has checked how many the request wants."""
_REASONING = frozenset({"reasoning", "reasoning_content"})

_decode_object = msgspec.json.Decoder(Fields).decode
_decode_objects = msgspec.json.Decoder(list[Fields]).decode


class Answer(ABC):
    """Writes one response, from one completion."""

    reads_tokens = False
    """Whether it needs the tokens of log-probabilities."""
    turn_id = ""
    """The id of the turn, set before anything is read; empty for a turn that is not recorded."""
    shows_all = False
    """Whether the client gets what the engine sends as it is."""
    hides_weights = False
    """Whether choices report weights that only the proxy asked for; set before anything is read."""

    @abstractmethod
    def whole(self, parsed: Parsed, body: bytes, read: Completion) -> bytes:
        """The body for a whole completion.

        Args:
            parsed: the completion, of which `body` is the JSON.
            read: what was read of it for the record.
        """

    async def settle(self) -> None:  # noqa: B027 - most formats have nothing to do
        """Do what must be done before the client gets the end of the response, such as to store it."""


class StreamedAnswer(Answer):
    """Writes one response, from one completion or from chunks and then their end."""

    @abstractmethod
    def event(self, event: bytes, usual: UsualChunk | None, parsed: Parsed | None) -> bytes | None:
        """The events for the next event of the engine; None or empty if there are none.

        Args:
            event: one with data.
            usual: its chunk, if that has the usual shape.
            parsed: its chunk, if that had to be parsed.
        """

    @abstractmethod
    def end(self) -> bytes:
        """The events after the last chunk."""

    def broken(self, error: ApiError) -> bytes:
        """The events of a stream that cannot be completed, before the error event that every route has."""
        return b""


class Redactor(StreamedAnswer):
    """Redacts a whole completion, or a stream chunk by chunk."""

    def __init__(self, visible: Visible, route: EngineRoute = EngineRoute.CHAT) -> None:
        self._visible = visible
        self.shows_all = visible.every_chunk
        self._route = route
        self._names_tokens = route is EngineRoute.GENERATE and visible.logprobs
        self._named: set[tuple[int, int, str]] = set()
        """Choices and positions of the calls whose id or name the client got, with the name of that field."""

    def whole(self, parsed: Parsed, body: bytes, read: Completion) -> bytes:
        """See `Answer.whole`."""
        visible = self._visible
        if visible.everything and not visible.on_messages and not self._holds_hidden_weights(body):
            return self._with_both_names(body)
        fields = _decoded(parsed)
        choices = _choices(fields)
        if self._route is EngineRoute.GENERATE and not visible.ids:
            fields |= {name: _NULL for name in _OF_PROMPT if name in fields}
        if visible.on_messages and read.prompt_ids is not None:
            for choice, sampled in zip(choices or (), read.choices, strict=False):
                message = _object(raw_value(choice, "message") or NULL) if isinstance(choice, dict) else None
                if isinstance(message, dict):
                    choice["message"] = raw(with_ids(message, read.prompt_ids, sampled))
        return self._redacted(fields, choices, parsed)

    def event(self, event: bytes, usual: UsualChunk | None, parsed: Parsed | None) -> bytes | None:
        """See `StreamedAnswer.event`. Raises EngineBroken if its data is not a JSON object."""
        if parsed is not None and b'"tool_calls"' in event:
            event, parsed = self._named_once(event, parsed)
        if self.shows_all and not self._holds_hidden_weights(event):
            return self._with_both_names(event)
        if usual is not None and (redacted := usual.redacted(self._visible)) is not None:
            return redacted
        shown = self.chunk(parsed or parsing.parse(event_data(event) or b""))
        return None if shown is None else replace_data(event, shown)

    def _named_once(self, event: bytes, parsed: Parsed) -> tuple[bytes, Parsed]:
        """A chunk without the ids and names that earlier pieces of its calls had: SDKs concatenate them."""
        repeats, parts = False, parsed.completion.choices or ()
        for part in parts:
            pieces = calls_of(part.said)
            calls = [call for call in part.said["tool_calls"] if isinstance(call, dict)] if pieces else ()
            for piece, call in zip(pieces, calls, strict=True):
                for holder, name in ((call, "id"), (call.get("function"), "name")):
                    if not isinstance(holder, dict) or not holder.get(name):
                        continue
                    key = (part.index or 0, piece.position, name)
                    if key in self._named:
                        del holder[name]
                        repeats = True
                    self._named.add(key)
        if not repeats:
            return event, parsed
        fields = _decoded(parsed)
        if parsed.prompt is not None:
            fields[_PROMPT] = msgspec.Raw(parsed.prompt)
        choices = [each for each in _choices(fields) or () if isinstance(each, dict)]
        shown = [each | {"delta": raw(part.said)} for each, part in zip(choices, parts, strict=True)]
        data = msgspec.json.encode({**fields, "choices": shown})
        return replace_data(event, data), msgspec.structs.replace(parsed, json=data)

    def chunk(self, parsed: Parsed) -> bytes | None:
        """A chunk of any shape with the fields that the client requested; None if it holds none of them."""
        fields = _decoded(parsed)
        choices = _choices(fields)
        if raw_value(fields, "error") is None and choices is not None and not self._shows(choices):
            return None
        if choices and not self._visible.running_usage:
            fields.pop("usage", None)
        if self._route is EngineRoute.GENERATE and choices:
            fields.setdefault("usage", _NULL)
            if not self._visible.ids:
                for name in _OF_PROMPT:
                    fields.pop(name, None)
        return self._redacted(fields, choices, parsed)

    def end(self) -> bytes:
        """See `StreamedAnswer.end`."""
        return data_event(DONE)

    def _holds_hidden_weights(self, body: bytes) -> bool:
        return self.hides_weights and _QUOTED_WEIGHTS in body

    def _shows(self, choices: list[Any]) -> bool:
        """Whether a chunk holds anything that the client requested."""
        if not choices:
            return self._visible.usage
        if self._route is not EngineRoute.CHAT:
            return True  # these routes send no chunk only for evidence
        evidence = self._visible.ids or self._visible.logprobs
        return evidence or any(_holds_more(choice, self._visible.reasoning) for choice in choices)

    def _redacted(self, fields: Fields, choices: list[Any] | None, parsed: Parsed) -> bytes:
        """A completion or chunk as JSON with the fields that the client requested.

        Args:
            choices: its parsed choices; None if they have an odd shape.
        """
        ids, logprobs = self._visible.ids, self._visible.logprobs
        if _PROMPT in fields and not ids:
            fields[_PROMPT] = _NULL
        elif parsed.prompt is not None:
            fields[_PROMPT] = msgspec.Raw(parsed.prompt)
        if not choices:
            return self._with_both_names(msgspec.json.encode(fields))
        for choice in choices:
            if not isinstance(choice, dict):
                continue
            if not ids:
                choice |= {name: _NULL for name in _IDS_IN_CHOICE[self._route] if name in choice}
            elif parsed.ids is not None:
                choice["token_ids"] = msgspec.Raw(parsed.ids)
            if not logprobs and "logprobs" in choice:
                choice["logprobs"] = _NULL
            elif parsed.logprobs is not None:
                marked = bytes(choice["logprobs"])
                choice["logprobs"] = msgspec.Raw(marked.replace(LOGPROBS_MARK, parsed.logprobs, 1))
            if self.hides_weights and _WEIGHTS in choice:
                choice[_WEIGHTS] = _NULL
            if not self._visible.reasoning:
                _hide_reasoning(choice)
        return self._with_both_names(msgspec.json.encode({**fields, "choices": choices}))

    def _with_both_names(self, shown: bytes) -> bytes:
        """A response of generate whose log-probabilities name each token as all releases of vLLM do.

        vLLM names it by `"token": "token_id:5"` up to 0.31, and by `"token_id": 5` from 0.32 on; clients read
        one of them. A response that has both, or texts, stays as it is.
        """
        if not self._names_tokens or (b'"token":' in shown) == (new := b'"token_id":' in shown):
            return shown
        return (_TOKEN_ID if new else _TOKEN).sub(_BOTH, shown)


def _holds_more(choice: Fields | msgspec.Raw, reasoning: bool) -> bool:
    """Whether a piece of a choice holds fields other than evidence."""
    if isinstance(choice, msgspec.Raw) or raw_value(choice, "finish_reason") is not None:
        return True
    delta = raw_value(choice, "delta") or b"{}"
    if reasoning:
        return delta.strip(b"{} \t\r\n") != b""
    fields = _object(delta)
    return bool(fields.keys() - _REASONING) if isinstance(fields, dict) else True


def _hide_reasoning(choice: dict[str, Any]) -> None:
    for name in ("message", "delta"):
        data = raw_value(choice, name)
        message = None if data is None else _object(data)
        if not isinstance(message, dict):
            continue
        hidden = {key: _NULL if key in _REASONING else value for key, value in message.items()}
        if name == "delta":  # a delta holds only the fields that change
            hidden = {key: value for key, value in hidden.items() if not is_null(value)}
        choice[name] = hidden


# --- the answer to a request whose session has reached a limit: a final message that no engine sampled


_STORED_BYTES = 2**20
"""Of a body: after a request with more, the answer of a session at its limit is not stored."""


async def limit_answer(request: ChatRequest, answer: Answer) -> Response:
    """Answer a request without an engine, so that a program accepts the answer and ends.

    It is written in the engine's format, and the request's own format is made of it as of an engine's answer.
    It is not recorded, and not kept for a retry. After a request that is larger than engines take, it is not
    stored either: all tenants share the bytes of stored responses.

    Args:
        answer: what writes the response.

    Raises:
        ApiError: the response is to be stored, and the store does not respond.
    """
    assert request.session is not None  # it has a limit
    name, limit = request.session.name, request.session_limit
    log.info("session %s has reached its limit `%s`: a request was answered without an engine", name, limit)
    stored = len(request.retry.body) <= _STORED_BYTES
    told = [(b"x-session-limit", limit.encode()), (b"x-session-id", name.encode())]
    if not request.stream or not isinstance(answer, StreamedAnswer):
        body = msgspec.json.encode(_final(request, "message"))
        shown = answer.whole(parsing.parse(body, tokens=answer.reads_tokens), body, Completion())
        if stored:
            await answer.settle()
        return BytesResponse(200, [*JSON_HEADERS, *told], shown)
    chunk, shown = _final(request, "delta"), b""
    for part in (chunk, {**chunk, "choices": []}):
        data = msgspec.json.encode(part)
        shown += answer.event(data_event(data), None, parsing.parse(data, tokens=answer.reads_tokens)) or b""
    shown += answer.end()
    if stored:
        await answer.settle()
    stream = BytesResponse(200, [], shown)  # its beginning may be sent already, unlike that of a replay
    return StreamResponse(200, [*EVENT_HEADERS, *told], stream.chunks(), stream)


def _final(request: ChatRequest, message: str) -> dict[str, Any]:
    """A completion of no sampled ids, or the only chunk of one.

    Args:
        message: the name of the field with the message of a choice.
    """
    name, prompts = new_id(), request.prompts or (request.given,)
    chat = "chat.completion.chunk" if request.stream else "chat.completion"
    each = (_final_choice(request, message, prompt) for prompt in prompts for _ in range(request.choices))
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


def _final_choice(request: ChatRequest, message: str, prompt: GivenIds | None) -> dict[str, Any]:
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


# --- parsing


def _decoded(parsed: Parsed) -> Fields:
    """The fields of a completion or chunk. Raises EngineBroken."""
    fields = _object(parsed.json)
    if not isinstance(fields, dict):
        raise parsing.no_completion()
    return fields


def _choices(fields: Fields) -> list[Any] | None:
    """The fields of each choice, or its bytes if it is not an object. None if the choices are not a list."""
    data = raw_value(fields, "choices") or b"[]"
    try:
        return _decode_objects(data)
    except REFUSALS:
        choices = parsing.parse_leniently(data)
        return [_fields(choice) for choice in choices] if isinstance(choices, list) else None


def _object(data: bytes) -> Fields | msgspec.Raw:
    """The fields of an object, each still JSON; for another value, its JSON."""
    try:
        return _decode_object(data)
    except REFUSALS:
        return _fields(parsing.parse_leniently(data))


def _fields(value: Any) -> Fields | msgspec.Raw:
    if not isinstance(value, dict):
        return parsing.dump(value)
    return {name: parsing.dump(item) for name, item in value.items()}
