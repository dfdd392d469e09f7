"""The response object of a turn, whole or as a stream of events."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from proxy.dialects.chat_parts import Chat, MessagePart, UsagePart
from proxy.dialects.responses import compaction, errors, ids
from proxy.dialects.responses.items import Item
from proxy.dialects.responses.output import Event, Output, OutputOptions
from proxy.dialects.responses.records import ResponseRecord, Summary
from proxy.dialects.responses.request import ResponsesRequest
from proxy.dialects.translated import Translation
from proxy.errors import ApiError, EngineBroken, Unavailable
from proxy.fields import raw_value
from proxy.history.vocabulary import BROKEN_OFF

Keep = Callable[[str, bytes], Awaitable[bool]]
"""Stores a document under a name; False after a failure, which is reported."""
_ECHOED: Mapping[str, Any] = {
    "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {},
    "previous_response_id": None, "prompt_cache_key": None, "safety_identifier": None, "temperature": None,
    "text": {"format": {"type": "text"}}, "tools": [], "top_logprobs": None, "top_p": None,
    "truncation": "disabled", "user": None,
}  # fmt: skip
"""Fields of a request that its response repeats, with the values in place of those that are not set."""
_INCOMPLETE: Mapping[str, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Reasons why a response is incomplete, by the engine's finish reasons."""


class ResponsesTranslation(Translation):
    """Writes the response to a request of `/v1/responses`."""

    def __init__(
        self, request: ResponsesRequest, items: Sequence[Item], chain: Sequence[str], keep: Keep
    ) -> None:
        """A response that is about to begin.

        Args:
            items: the input items of the request, references resolved.
            chain: ids of the responses before it.
            keep: stores it.
        """
        self._request = request
        self._items = items
        self._chain = chain
        self._keep = keep
        self._name = ""
        self._output: Output | None = None
        self._created = int(time.time())
        self._model = _model(request)
        self._usage = UsagePart()
        self._finish: str | None = None
        self._sequence = self._before_end = 0
        self._begun = self._ended = False
        self._final: Item | None = None

    def whole(self, completion: Chat) -> bytes:
        """See `Translation.whole`. Raises EngineBroken."""
        self._created = completion.created or self._created
        self._read(completion)
        self._close()
        self._refuse_broken()
        return msgspec.json.encode(self._final)

    def begin(self) -> bytes:
        """See `Translation.begin`."""
        self._begun = True
        response = self._response("in_progress", [])
        events: list[Event] = [
            {"type": f"response.{name}", "response": response} for name in ("created", "in_progress")
        ]
        return self._encoded(events)

    def chunk(self, chunk: Chat) -> bytes:
        """See `Translation.chunk`. Raises EngineBroken."""
        beginning = b""
        if not self._begun:
            self._created, self._model = chunk.created or self._created, chunk.model or self._model
            beginning = self.begin()
        return beginning + self._encoded(self._read(chunk))

    def end(self) -> bytes:
        """See `Translation.end`."""
        beginning = b"" if self._begun else self.begin()
        self._before_end = self._sequence
        events = self._close()
        self._ended = True
        assert self._final is not None
        kind = self._final["status"]
        if kind == "incomplete" and self._finish == "length" and not self._request.own_limit:
            # Codex repeats a request whose response ends with `response.incomplete`; a limit that the client
            # did not set is the server's own, and a repeated answer would be as long
            kind = "completed"
        return beginning + self._encoded([*events, {"type": f"response.{kind}", "response": self._final}])

    def error(self, status: int, message: str, code: str | None) -> bytes:
        """See `Translation.error`."""
        return errors.engine_error(status, message, code)

    def in_stream(self, status: int, message: str, code: str | None) -> bool:
        """See `Translation.in_stream`. Codex knows a context that is full by this event only."""
        return self._request.stream and errors.exceeds_context(status, message, code)

    def error_event(self, status: int, message: str, code: str | None) -> bytes:
        """See `Translation.error_event`."""
        beginning = b"" if self._begun else self.begin()
        self._ended = True
        response = self._response("failed", self._output.items if self._output else [])
        response["error"] = errors.failure(status, message, code)
        return beginning + self._encoded([{"type": "response.failed", "response": response}])

    def broken(self, error: ApiError) -> bytes:
        """See `Translation.broken`."""
        return b"" if self._ended else self.error_event(error.status, error.message, error.code)

    async def settle(self) -> None:
        """See `Translation.settle`: store the response."""
        if self._final is None or self._final["status"] == "failed" or not self._request.store:
            return
        record = ResponseRecord(
            msgspec.Raw(msgspec.json.encode(self._final)), list(self._items), list(self._chain)
        )
        await self._keep(self._named(), msgspec.json.encode(record))

    def _read(self, chat: Chat) -> list[Event]:
        """Read a completion or a chunk; returns the events for it."""
        if chat.usage is not None:
            self._usage = chat.usage
        choice = next((choice for choice in chat.choices if choice.index == 0), None)
        if choice is None:
            return []
        self._finish = choice.finish_reason or self._finish
        self._model = chat.model or self._model
        part = choice.message or choice.delta
        if choice.message is not None:
            # calls of a whole message have no index
            for index, call in enumerate(choice.message.tool_calls or []):
                call.index = index
        return [] if part is None else self._add(part, _logprobs(choice.logprobs))

    def _add(self, part: MessagePart, logprobs: list[Item]) -> list[Event]:
        return self._outputs.add(part, logprobs if self._request.logprobs else [])

    def _close(self) -> list[Event]:
        """Complete the output and the response; returns the events for that."""
        reason = _INCOMPLETE.get(self._finish or "")
        status = "incomplete" if reason else "completed"
        events = self._outputs.end(status)
        self._final = self._response(status, self._outputs.items)
        if self._finish in BROKEN_OFF:
            self._final["status"] = "failed"
            self._final["error"] = errors.failure(500, _broken(self._finish), None)
        elif reason:
            self._final["incomplete_details"] = {"reason": reason}
        self._final["usage"] = _usage(self._usage)
        return events

    def _refuse_broken(self) -> None:
        """Raises EngineBroken if the engine did not end the turn."""
        if self._finish in BROKEN_OFF:
            raise EngineBroken(_broken(self._finish))

    @property
    def _outputs(self) -> Output:
        if self._output is None:
            request = self._request
            options = OutputOptions(request.tools, request.summary, request.encrypted)
            # a stream that began early has a name of its own, because the turn had none
            self._output = Output(options, self._names)
        return self._output

    @property
    def _names(self) -> ids.Names:
        return ids.Names(self.turn_id or self._named().removeprefix("resp_"), self.tokens)

    def _named(self) -> str:
        if not self._name:
            self._name = ids.response_id(ids.base_of(self.turn_id))
        return self._name

    def _response(self, status: str, output: Sequence[Item]) -> Item:
        """The response object so far."""
        return {
            "id": self._named(),
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": list(output),
            "parallel_tool_calls": raw_value(self._request.fields, "parallel_tool_calls") != b"false",
            "reasoning": _value(self._request, "reasoning", {"effort": None, "summary": None}),
            "service_tier": "default",
            "store": self._request.store,
            "tool_choice": _value(self._request, "tool_choice", "auto"),
            "usage": None,
            **{name: _value(self._request, name, default) for name, default in _ECHOED.items()},
        }

    def _encoded(self, events: Sequence[Event]) -> bytes:
        """Events as they are sent."""
        sent: list[bytes] = []
        for event in events:
            sent += b"event: ", event["type"].encode(), b"\ndata: "
            sent += msgspec.json.encode({**event, "sequence_number": self._sequence}), b"\n\n"
            self._sequence += 1
        return b"".join(sent)


class CompactionTranslation(ResponsesTranslation):
    """Writes the response to a request to compact the conversation: one item that names the summary."""

    def __init__(
        self, request: ResponsesRequest, items: Sequence[Item], chain: Sequence[str], keep: Keep
    ) -> None:
        super().__init__(request, items, chain, keep)
        self._pieces: list[str] = []
        """Of the summary."""

    def _add(self, part: MessagePart, logprobs: list[Item]) -> list[Event]:
        if part.content:
            self._pieces.append(part.content)
        return []

    def _close(self) -> list[Event]:
        item: Item = {
            "id": self._names.item("compaction", 0),
            "type": "compaction",
            "encrypted_content": self._names.encrypted(0),
        }
        self._final = self._response("completed", [item])
        self._final["usage"] = _usage(self._usage)
        if self._finish in BROKEN_OFF or not self._summary:
            self._final["status"] = "failed"
            self._final["output"] = []
            self._final["error"] = errors.failure(500, _broken(self._finish), None)
            return []
        event = {"output_index": 0, "item": item}
        return [{"type": f"response.output_item.{name}", **event} for name in ("added", "done")]

    def _refuse_broken(self) -> None:
        if self._finish in BROKEN_OFF or not self._summary:
            raise EngineBroken(_broken(self._finish))

    async def settle(self) -> None:
        """See `Translation.settle`: store the summary, also for a client that stores nothing itself.

        Raises:
            Unavailable: it cannot be stored. The client would replace its conversation by a name of nothing.
        """
        if self._summary and self._final is not None and self._final["status"] != "failed":
            text = compaction.summary_message(self._summary)
            if not await self._keep(self._names.item("compaction", 0), msgspec.json.encode(Summary(text))):
                self._ended, self._sequence = False, self._before_end  # its last events are not sent
                raise Unavailable("the store does not respond, so the summary is not kept: try again later")
        await super().settle()

    @property
    def _summary(self) -> str:
        return "".join(self._pieces).strip()


class CompactedTranslation(CompactionTranslation):
    """Writes the response of `/v1/responses/compact`: the messages of the user, and the compaction."""

    def __init__(
        self, request: ResponsesRequest, items: Sequence[Item], earlier: Sequence[Item], keep: Keep
    ) -> None:
        """`earlier`: the items of the previous responses."""
        super().__init__(request, items, [], keep)
        self._kept = [item for item in (*earlier, *items) if item.get("role") == "user"]

    def whole(self, completion: Chat) -> bytes:
        """See `Translation.whole`. Raises EngineBroken."""
        super().whole(completion)
        assert self._final is not None
        messages = [self._message(item, index) for index, item in enumerate(self._kept)]
        return msgspec.json.encode(
            {
                "id": self._named(),
                "object": "response.compaction",
                "created_at": self._created,
                "output": [*messages, *self._final["output"]],
                "usage": self._final["usage"],
            }
        )

    def _message(self, item: Item, index: int) -> Item:
        content = item["content"]
        if isinstance(content, str):
            content = [{"type": "input_text", "text": content}]
        return {
            "id": ids.input_item_id(self._named(), index), "status": "completed", **item, "type": "message",
            "content": content,
        }  # fmt: skip


def _model(request: ResponsesRequest) -> str:
    """The model that a request names; empty if it names none."""
    value = raw_value(request.fields, "model")
    try:
        return msgspec.json.decode(value, type=str) if value else ""
    except msgspec.ValidationError:
        return ""  # the engine refuses it


def _value(request: ResponsesRequest, name: str, default: Any) -> Any:
    """A field of the request as its client sent it, or a default."""
    value = raw_value(request.fields, name)
    return default if value is None else msgspec.Raw(value)


def _broken(finish: str | None) -> str:
    if finish in BROKEN_OFF:
        return f"the engine ended the turn before it was complete ({finish})"
    return "the model wrote no summary of the conversation"


def _usage(usage: UsagePart) -> Item:
    details = usage.completion_tokens_details
    sampled = usage.completion_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": (details.reasoning_tokens if details else None) or 0},
        "total_tokens": usage.prompt_tokens + sampled,
    }


def _logprobs(logprobs: Mapping[str, Any] | None) -> list[Item]:
    content = (logprobs or {}).get("content")
    if not isinstance(content, list):
        return []
    return [
        {**_logprob(entry), "top_logprobs": [_logprob(other) for other in entry.get("top_logprobs") or []]}
        for entry in content
    ]


def _logprob(entry: Mapping[str, Any]) -> Item:
    token = str(entry.get("token", ""))
    return {
        "token": token,
        "bytes": entry.get("bytes") or list(token.encode(errors="replace")),
        "logprob": entry.get("logprob"),
    }
