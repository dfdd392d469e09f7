"""What a client gets of a turn, written from what was read of the engine's response for the record.

`Redactor` writes the engine's own format. The proxy always requests ids, log-probabilities and usage from the
engine. A client that requested them too gets the engine's own bytes; for other clients these fields are null,
and chunks that hold nothing else are not sent. `tokenproxy.formats.translated` writes other formats.
"""

import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Any

import msgspec
from msgspec import UNSET

from tokenproxy.base.errors import ApiError
from tokenproxy.base.fields import NULL, raw
from tokenproxy.base.http import EVENT_HEADERS, JSON_HEADERS, BytesResponse, Response, StreamResponse
from tokenproxy.base.request import ChatRequest, EngineRoute, GivenIds, Visible
from tokenproxy.engine.sse import DONE, data_event, event_data, replace_data
from tokenproxy.record.completion import Completion as Recorded
from tokenproxy.record.turn import new_id
from tokenproxy.turn.lenient import read_fields
from tokenproxy.turn.parsing import OddChoice, OddCompletion, OddDelta, encode, parse
from tokenproxy.turn.required_prefix import with_ids
from tokenproxy.turn.usual import UsualChunk
from tokenproxy.turn.wire import Choice, Completion, Delta, calls_of, is_set

log = logging.getLogger("tokenproxy")

_NULL = msgspec.Raw(NULL)
_PROMPT = "prompt_token_ids"
_IDS_IN_CHOICE = {
    EngineRoute.CHAT: ("token_ids",),
    EngineRoute.COMPLETIONS: ("token_ids", _PROMPT),
    EngineRoute.GENERATE: (),
}
"""The fields of a choice that hold ids which clients may request; generate always returns the sampled ids."""
_IDS_IN_COMPLETION = {
    EngineRoute.CHAT: (_PROMPT,),
    EngineRoute.COMPLETIONS: (_PROMPT,),
    EngineRoute.GENERATE: (_PROMPT, "mm_placeholders"),
}
"""The same fields of a completion or chunk."""
_TOKEN_ID, _TOKEN = re.compile(rb'"token_id":\s*(\d+)'), re.compile(rb'"token":\s*"token_id:(\d+)"')
_BOTH = rb'"token":"token_id:\1","token_id":\1'
_MOST_CHOICES = 4096
"""Of a final answer: no engine has checked how many the request wants."""
_REASONING = ("reasoning", "reasoning_content")
_OF_DELTA = Delta.__struct_fields__
_WITHOUT_REASONING = tuple(name for name in _OF_DELTA if name not in _REASONING)


class Answer(ABC):
    """Writes one response, from one completion."""

    turn_id = ""
    """The id of the turn, set before anything is read; empty for a turn that is not recorded."""
    shows_all = False
    """Whether the client gets what the engine sends as it is."""

    @abstractmethod
    def whole(self, whole: Completion, body: bytes, read: Recorded) -> bytes:
        """The body for a whole completion, which may be changed in place.

        Args:
            body: the JSON of the completion.
            read: what was read of it for the record.
        """

    async def settle(self) -> None:  # noqa: B027 - most formats have nothing to do
        """Do what must be done before the client gets the end of the response, such as to store it."""


class StreamedAnswer(Answer):
    """Writes one response, from one completion or from chunks and then their end."""

    @abstractmethod
    def event(self, event: bytes, chunk: Completion) -> bytes | None:
        """The events for the next event of the engine; None or empty if there are none.

        Args:
            event: one with data.
            chunk: its chunk, which may be changed in place.
        """

    def usual(self, event: bytes, chunk: UsualChunk) -> bytes | None:
        """As `event`, for a chunk that was not parsed."""
        return self.event(event, parse(event_data(event) or b""))

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
        self._evidence = visible.ids or visible.logprobs
        self._names_tokens = route is EngineRoute.GENERATE and visible.logprobs
        self._hidden_of_all = () if visible.ids else _IDS_IN_COMPLETION[route]
        """Fields that are null for the client."""
        self._hidden = (
            *(() if visible.ids else _IDS_IN_CHOICE[route]),
            *(() if visible.logprobs else ("logprobs",)),
            *visible.hidden,
        )
        """The same of a choice."""
        self._named: set[tuple[int, int, str]] = set()
        """Choices and positions of the calls whose id or name the client got, with the name of that field."""

    def whole(self, whole: Completion, body: bytes, read: Recorded) -> bytes:
        """See `Answer.whole`."""
        visible, choices = self._visible, whole.choices or ()
        if visible.everything and not visible.on_messages and not self._holds_hidden(choices):
            return self._with_both_names(body)
        if visible.on_messages and read.prompt_ids is not None:
            for choice, sampled in zip(choices, read.choices, strict=False):
                if choice.message:
                    choice.message = raw(
                        with_ids(read_fields(bytes(choice.message)) or {}, read.prompt_ids, sampled)
                    )
        return self._redacted(whole, choices)

    def event(self, event: bytes, chunk: Completion) -> bytes | None:
        """See `StreamedAnswer.event`."""
        choices, visible = chunk.choices or (), self._visible
        changed = sum(map(self._name_once, choices)) > 0
        if self.shows_all and not (changed or self._holds_hidden(choices)):
            return self._with_both_names(event)
        if not (self.shows_all or self._shows(chunk, choices)):
            return None
        if choices and not visible.running_usage:
            chunk.usage = UNSET
        if choices and self._route is EngineRoute.GENERATE:
            if not chunk.usage:
                chunk.usage = _NULL
            if not visible.ids:
                chunk.prompt_token_ids = chunk.mm_placeholders = UNSET
        return replace_data(event, self._redacted(chunk, choices))

    def usual(self, event: bytes, chunk: UsualChunk) -> bytes | None:
        """See `StreamedAnswer.usual`."""
        return event if self.shows_all else chunk.redacted(self._visible) or super().usual(event, chunk)

    def _name_once(self, choice: Choice) -> bool:
        """Remove ids and names that earlier pieces of a call had: SDKs concatenate them. Returns whether it
        did."""
        removed, calls = False, (choice.delta and choice.delta.tool_calls) or ()
        for piece, call in zip(calls_of({"tool_calls": calls}), calls, strict=True):
            for holder, name in ((call, "id"), (call.get("function"), "name")):
                if not isinstance(holder, dict) or not holder.get(name):
                    continue
                key = (choice.index or 0, piece.position, name)
                if key in self._named:
                    del holder[name]
                    removed = True
                self._named.add(key)
        return removed

    def end(self) -> bytes:
        """See `StreamedAnswer.end`."""
        return data_event(DONE)

    def _holds_hidden(self, choices: Iterable[Choice]) -> bool:
        hidden = self._visible.hidden
        return any(getattr(choice, name) for choice in choices for name in hidden)

    def _shows(self, chunk: Completion, choices: Collection[Choice]) -> bool:
        """Whether a chunk holds anything that the client requested."""
        if (chunk.error and is_set(chunk.error)) or (
            isinstance(chunk, OddCompletion) and "choices" in chunk.more
        ):
            return True
        if not choices:
            return self._visible.usage
        if self._evidence or self._route is not EngineRoute.CHAT:
            return True  # the other routes send no chunk only for evidence
        reasoning = self._visible.reasoning
        return any(_says(choice, reasoning) for choice in choices)

    def _redacted(self, completion: Completion, choices: Iterable[Choice]) -> bytes:
        """A completion or chunk as JSON with the fields that the client requested."""
        for name in self._hidden_of_all:
            if getattr(completion, name):
                setattr(completion, name, _NULL)
        for choice in choices:
            for name in self._hidden:
                if getattr(choice, name):
                    setattr(choice, name, _NULL)
            if not self._visible.reasoning:
                _hide_reasoning(choice)
        return self._with_both_names(encode(completion))

    def _with_both_names(self, shown: bytes) -> bytes:
        """A response of generate whose log-probabilities name each token as all releases of vLLM do.

        vLLM names it by `"token": "token_id:5"` up to 0.31, and by `"token_id": 5` from 0.32 on; clients read
        one of them. A response that has both, or texts, stays as it is.
        """
        if not self._names_tokens or (b'"token":' in shown) == (new := b'"token_id":' in shown):
            return shown
        return (_TOKEN_ID if new else _TOKEN).sub(_BOTH, shown)


def _says(choice: Choice, reasoning: bool) -> bool:
    """Whether a piece of a choice holds fields other than evidence."""
    if choice.finish_reason:
        return True
    if not (delta := choice.delta):
        return isinstance(choice, OddChoice) and "delta" in choice.more
    if delta.content is not UNSET:
        return True
    names = _OF_DELTA if reasoning else _WITHOUT_REASONING
    return isinstance(delta, OddDelta) or any(getattr(delta, name) is not UNSET for name in names)


def _hide_reasoning(choice: Choice) -> None:
    if choice.message and (message := read_fields(bytes(choice.message))) is not None:
        choice.message = raw(message | {name: _NULL for name in _REASONING if name in message})
    if delta := choice.delta:
        for name in _OF_DELTA:  # a delta holds only the fields that change
            if name in _REASONING or getattr(delta, name) is None:
                setattr(delta, name, UNSET)


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
        shown = answer.whole(parse(body), body, Recorded())
        if stored:
            await answer.settle()
        return BytesResponse(200, [*JSON_HEADERS, *told], shown)
    chunk, shown = _final(request, "delta"), b""
    for part in (chunk, {**chunk, "choices": []}):
        data = msgspec.json.encode(part)
        shown += answer.event(data_event(data), parse(data)) or b""
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
