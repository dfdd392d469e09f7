"""The response object of a turn, whole or as a stream of events."""

import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from tokenproxy.base.errors import ApiError, BadRequest, EngineBroken, Unavailable, error_body
from tokenproxy.base.fields import raw_value
from tokenproxy.formats.responses.items import Item, Names, input_item_id, response_id
from tokenproxy.formats.responses.output import Event, Output
from tokenproxy.formats.responses.records import ResponseRecord, Summary
from tokenproxy.formats.responses.request import ResponsesRequest
from tokenproxy.formats.translated import Translation
from tokenproxy.record.turn import new_id
from tokenproxy.turn import wire

Keep = Callable[[str, bytes], Awaitable[bool]]
"""Stores a document under a name; False after a failure, which is reported."""
_ECHOED: Mapping[str, Any] = {
    "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {},
    "previous_response_id": None, "prompt_cache_key": None, "safety_identifier": None, "temperature": None,
    "text": {"format": {"type": "text"}}, "tools": [], "top_logprobs": None, "top_p": None,
    "truncation": "disabled", "user": None, "reasoning": {"effort": None, "summary": None},
    "tool_choice": "auto",
}  # fmt: skip
"""Fields of a request that its response repeats, with the values in place of those that are not set."""
_INCOMPLETE: Mapping[str, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Reasons why a response is incomplete, by the engine's finish reasons."""
_CONTEXT = "context_length_exceeded"
_TOO_LONG = re.compile("maximum context length|longer than the maximum model length")
"""Matches what vLLM says of a prompt that does not fit."""
_SUMMARY_PREFIX = """\
The conversation so far was compacted. Another instance of you worked on it and left this summary; continue \
from there:"""


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
        super().__init__()
        self._request = request
        self._items = items
        self._chain = chain
        self._keep = keep
        self._created = int(time.time())
        self._sequence = self._before_end = 0
        self._final: Item = {}

    def message(self, choice: wire.Choice) -> bytes:
        """See `Translation.message`. Raises EngineBroken."""
        self._created = self.head.created or self._created
        self._add(choice, choice.said)
        self._complete()
        if self._final["status"] == "failed":
            raise EngineBroken(self._final["error"]["message"])
        return msgspec.json.encode(self._final)

    def start(self) -> bytes:
        """See `Translation.start`."""
        self._created = self.head.created or self._created
        response = self._response("in_progress", [])
        return self._encoded(
            {"type": f"response.{name}", "response": response} for name in ("created", "in_progress")
        )

    def piece(self, choice: wire.Choice) -> bytes:
        """See `Translation.piece`. Raises EngineBroken."""
        return self._encoded(self._add(choice, choice.said))

    def finished(self) -> bytes:
        """See `Translation.finished`."""
        self._before_end = self._sequence
        events = self._complete()
        kind = self._final["status"]
        own_limit = self._request.read.max_output_tokens is not None
        if kind == "incomplete" and self.finish == "length" and not own_limit:
            # Codex repeats a request whose response ends with `response.incomplete`; a limit that the client
            # did not set is the server's own, and a repeated answer would be as long
            kind = "completed"
        return self._encoded([*events, {"type": f"response.{kind}", "response": self._final}])

    def error(self, status: int, message: str, code: str | None) -> bytes:
        """See `Translation.error`."""
        full = _exceeds_context(status, message, code)
        kinds = {error.status: error.kind for error in ApiError.__subclasses__()}
        kind = kinds.get(status, BadRequest.kind if status < 500 else ApiError.kind)
        return error_body(message, kind, "input" if full else None, _CONTEXT if full else code or status)

    def in_stream(self, status: int, message: str, code: str | None) -> bool:
        """See `Translation.in_stream`. Codex knows a context that is full by this event only."""
        return self._request.stream and _exceeds_context(status, message, code)

    def failed(self, status: int, message: str, code: str | None) -> bytes:
        """See `Translation.failed`."""
        response = self._response("failed", self._outputs.items)
        response["error"] = response_failure(status, message, code)
        return self._encoded([{"type": "response.failed", "response": response}])

    def broken(self, error: ApiError) -> bytes:
        """See `StreamedAnswer.broken`."""
        return b"" if self._ended else self.error_event(error.status, error.message, error.code)

    async def settle(self) -> None:
        """See `Answer.settle`: store the response."""
        if self._request.store and self._final.get("status", "failed") != "failed":
            record = ResponseRecord(
                msgspec.Raw(msgspec.json.encode(self._final)), list(self._items), list(self._chain)
            )
            await self._keep(self._named, msgspec.json.encode(record))

    def _add(self, choice: wire.Choice, message: dict[str, Any]) -> list[Event]:
        """The events for a message, or for the next piece of one."""
        logprobs = _logprobs(choice) if self._request.logprobs else []
        return self._outputs.add(message, self.thought(message), logprobs)

    def _complete(self) -> list[Event]:
        """Complete the output and the response; returns the events for that."""
        reason = _INCOMPLETE.get(self.finish or "")
        status = "incomplete" if reason else "completed"
        events: list[Event] = []
        self._outputs.end(status, events)
        self._set_final(status, self._outputs.items, "")
        if reason and not self.broken_off:
            self._final["incomplete_details"] = {"reason": reason}
        return events

    def _set_final(self, status: str, output: list[Item], problem: str) -> None:
        """Set the complete response, which failed if the engine did not end it or there is a `problem`."""
        problem = self.broken_off or problem
        self._final = self._response("failed" if problem else status, output)
        self._final["usage"] = _usage(self.usage)
        if problem:
            self._final["error"] = response_failure(500, problem, None)

    @cached_property
    def _outputs(self) -> Output:
        request = self._request
        # a stream that began early has a name of its own, because the turn had none
        return Output(self._names, request.tools, summary=request.summary, encrypted=request.encrypted)

    @property
    def _names(self) -> Names:
        return Names(self.turn_id or self._named.removeprefix("resp_"), self.tokens)

    @cached_property
    def _named(self) -> str:
        """The id of the response: that of its turn, or a new one if it is not recorded."""
        return response_id(self.turn_id or new_id())

    def _response(self, status: str, output: Sequence[Item]) -> Item:
        """The response object so far."""
        fields, model = self._request.fields, self._request.read.model
        echoed = {name: raw_value(fields, name) for name in _ECHOED}
        return {
            "id": self._named,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.head.model or (model if isinstance(model, str) else ""),
            "output": list(output),
            "parallel_tool_calls": raw_value(fields, "parallel_tool_calls") != b"false",
            "service_tier": "default",
            "store": self._request.store,
            "usage": None,
            **{
                name: _ECHOED[name] if value is None else msgspec.Raw(value) for name, value in echoed.items()
            },
        }

    def _encoded(self, events: Iterable[Event]) -> bytes:
        """Events as they are sent."""
        sent: list[bytes] = []
        for event in events:
            sent += b"event: ", event["type"].encode(), b"\ndata: "
            sent += msgspec.json.encode({**event, "sequence_number": self._sequence}), b"\n\n"
            self._sequence += 1
        return b"".join(sent)


class CompactionTranslation(ResponsesTranslation):
    """Writes the response to a request to compact the conversation: one item that names the summary.

    The model summarises the conversation in an ordinary turn. The encrypted content of the item names the
    stored summary.
    """

    kept: Sequence[Item] | None = None
    """The messages that stay, in the output of `/v1/responses/compact`; else None."""
    _written = ""
    """The summary so far."""

    def message(self, choice: wire.Choice) -> bytes:
        """See `Translation.message`. Raises EngineBroken."""
        response = super().message(choice)
        if self.kept is None:
            return response
        messages = [_kept_message(item, self._named, index) for index, item in enumerate(self.kept)]
        return msgspec.json.encode(
            {
                "id": self._named,
                "object": "response.compaction",
                "created_at": self._created,
                "output": [*messages, *self._final["output"]],
                "usage": self._final["usage"],
            }
        )

    async def settle(self) -> None:
        """See `Answer.settle`: store the summary, also for a client that stores nothing itself.

        Raises:
            Unavailable: it cannot be stored. The client would replace its conversation by a name of nothing.
        """
        if self._final.get("status", "failed") != "failed":
            summary = msgspec.json.encode(Summary(summary_message(self._summary)))
            if not await self._keep(self._names.item("compaction", 0), summary):
                self._ended, self._sequence = False, self._before_end  # its last events are not sent
                raise Unavailable("the store does not respond, so the summary is not kept: try again later")
        await super().settle()

    def _add(self, choice: wire.Choice, message: dict[str, Any]) -> list[Event]:
        self._written += wire.text_of(message)
        return []

    def _complete(self) -> list[Event]:
        name = self._names.item("compaction", 0)
        item: Item = {"id": name, "type": "compaction", "encrypted_content": self._names.encrypted(0)}
        problem = "" if self._summary else "the model wrote no summary of the conversation"
        self._set_final("completed", [item], problem)
        if self._final["status"] == "failed":
            self._final["output"] = []
            return []
        event = {"output_index": 0, "item": item}
        return [{"type": f"response.output_item.{name}", **event} for name in ("added", "done")]

    @property
    def _summary(self) -> str:
        return self._written.strip()


def summary_message(summary: str) -> str:
    """The user message that stands for a compacted conversation."""
    return f"{_SUMMARY_PREFIX}\n\n{summary}"


def _kept_message(item: Item, response: str, index: int) -> Item:
    content = item["content"]
    if isinstance(content, str):
        content = [{"type": "input_text", "text": content}]
    return {
        "id": input_item_id(response, index), "status": "completed", **item, "type": "message",
        "content": content,
    }  # fmt: skip


def _usage(usage: wire.Usage) -> Item:
    sampled = usage.completion_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + sampled,
    }


def _logprobs(choice: wire.Choice) -> list[Item]:
    logprobs = wire.token_logprobs_of(choice.logprobs)
    if logprobs is None:
        return []
    return [
        {**_logprob(position), "top_logprobs": [_logprob(other) for other in position.top_logprobs]}
        for position in logprobs.content or ()
    ]


def _logprob(entry: wire.Candidate) -> Item:
    return {"token": entry.token, "bytes": list(entry.spelled), "logprob": entry.logprob}


# --- an engine's errors, with the codes by which clients decide what to do next


def _exceeds_context(status: int, message: str, code: str | None) -> bool:
    """Whether an error of the engine is a prompt that is longer than the model's context."""
    return status == 400 and (code == _CONTEXT or bool(_TOO_LONG.search(message)))


def response_failure(status: int, message: str, code: str | None) -> dict[str, str]:
    """The `error` of a failed response."""
    if _exceeds_context(status, message, code):
        code = _CONTEXT
    elif status == 429:
        code = code if code == "insufficient_quota" else "rate_limit_exceeded"
    elif 400 <= status < 500:
        code = "invalid_prompt"
    else:
        code = "server_error"
    return {"code": code, "message": message}
