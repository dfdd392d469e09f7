"""Writes the response: a message, or the events of its stream.

    message_start
    content_block_start, content_block_delta ..., content_block_stop      for each block, one after the other
    message_delta                                                         once, with stop reason and usage
    message_stop

The blocks come in the order in which the model writes them. Text while a tool call is written waits until the
call is complete, because blocks do not overlap.
"""

from typing import Any, ClassVar

import msgspec

from proxy.dialects.chat_parts import CallPart, Chat, ChoicePart, UsagePart
from proxy.dialects.error_formats import anthropic_error
from proxy.dialects.messages.answer import (
    call_id,
    check_ended,
    empty_message,
    is_json,
    message,
    message_id,
    signature,
    stop_reason,
    usage,
    usage_so_far,
)
from proxy.dialects.translated import Translation

_encode = msgspec.json.encode
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b}\n\n'
_TEXT = b'{"type":"text_delta","text":%b}'
_THINKING = b'{"type":"thinking_delta","thinking":%b}'
_SIGNATURE = b'{"type":"signature_delta","signature":%b}'
_ARGUMENTS = b'{"type":"input_json_delta","partial_json":%b}'
_EMPTY_BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class MessagesTranslation(Translation):
    """Writes one response in Anthropic's format."""

    keep_alive: ClassVar[bytes] = b'event: ping\ndata: {"type":"ping"}\n\n'  # type: ignore[misc]

    def __init__(self, model: str) -> None:
        """`model`: the name that the client used."""
        self._model = model
        self._begun = False
        self._block = ""
        """The type of the open block; empty if none is open."""
        self._blocks = 0
        """Number of blocks that ended, which is the index of the open one."""
        self._call = 0
        """Index of the call that the open block writes."""
        self._arguments: list[str] = []
        """Of the last call."""
        self._is_object = False
        """Whether they begin as an object does, and are sent."""
        self._late: list[str] = []
        """Text that is not written yet: what arrived while a call was written."""
        self._calls = 0
        """Number of calls so far."""
        self._usage: UsagePart | None = None
        self._finish: str | None = None
        self._stop: int | str | None = None

    def whole(self, completion: Chat) -> bytes:
        """See `Translation.whole`. Raises EngineBroken."""
        return _encode(message(completion, self._model, self.turn_id, self.tokens))

    def begin(self) -> bytes:
        """See `Translation.begin`."""
        return self._start("")

    def chunk(self, chunk: Chat) -> bytes:
        """See `Translation.chunk`."""
        if chunk.usage is not None:
            self._usage = chunk.usage
        ready = [] if self._begun else [self._start(chunk.id)]
        for choice in chunk.choices:
            if choice.index == 0:
                self._add(choice, ready)
        return b"".join(ready)

    def end(self) -> bytes:
        """See `Translation.end`. Raises EngineBroken."""
        check_ended(self._finish)
        ready = [] if self._begun else [self._start("")]
        self._close(ready)
        if not self._blocks:
            self._open("text", _EMPTY_BLOCKS["text"], ready)
            self._close(ready)
        reason, sequence = stop_reason(
            self._finish or "stop",
            self._stop,
            tool_used=self._calls > 0,
            tool_complete=self._calls > 0 and is_json("".join(self._arguments)),
        )
        delta = {"container": None, "stop_reason": reason, "stop_sequence": sequence, "stop_details": None}
        ready.append(_event("message_delta", {"delta": delta, "usage": usage_so_far(self._usage)}))
        ready.append(_event("message_stop", {}))
        return b"".join(ready)

    def error(self, status: int, message: str, code: str | None) -> bytes:
        """See `Translation.error`."""
        return anthropic_error(status, message)

    def error_event(self, status: int, message: str, code: str | None) -> bytes:
        """See `Translation.error_event`."""
        return b"event: error\ndata: " + anthropic_error(status, message) + b"\n\n"

    def _start(self, completion_id: str) -> bytes:
        self._begun = True
        started = empty_message(message_id(self.turn_id, completion_id), self._model)
        return _event("message_start", {"message": {**started, "usage": usage(self._usage)}})

    def _add(self, choice: ChoicePart, ready: list[bytes]) -> None:
        """The events for the next piece of the answer."""
        if choice.finish_reason is not None:
            self._finish, self._stop = choice.finish_reason, choice.stop_reason
        delta = choice.delta
        if delta is None:
            return
        if thought := delta.thought:
            self._continue("thinking", ready)
            ready.append(_DELTA % (self._blocks, _THINKING % _encode(thought)))
        if text := delta.content:
            writes = self._block != "tool_use"
            if writes:
                self._continue("text", ready)
            self._late.append(text)
            if writes:
                self._write_late(ready)
        for call in delta.tool_calls or ():
            self._add_call(call, ready)

    def _add_call(self, call: CallPart, ready: list[bytes]) -> None:
        function = call.function
        if function is None:
            return
        continues = self._block == "tool_use" and self._call == call.index
        if function.name and not (continues and call.id is None):
            self._close(ready)
            identity = call_id(call, self._calls, self.tokens)
            block = {"type": "tool_use", "id": identity, "name": function.name, "input": {}}
            self._open("tool_use", block, ready)
            self._calls, self._call = self._calls + 1, call.index
            self._arguments, self._is_object = [], False
            continues = True
        if function.arguments and continues:
            self._add_arguments(function.arguments, ready)

    def _add_arguments(self, piece: str, ready: list[bytes]) -> None:
        """The event for the next arguments; none while they are no object, which the SDK could not parse."""
        self._arguments.append(piece)
        if not self._is_object:
            piece = "".join(self._arguments).lstrip()
            self._is_object = piece.startswith("{")
        if self._is_object:
            ready.append(_DELTA % (self._blocks, _ARGUMENTS % _encode(piece)))

    def _continue(self, kind: str, ready: list[bytes]) -> None:
        """Open a block for text or thinking, unless it is open."""
        if self._block != kind:
            self._close(ready)
            self._open(kind, _EMPTY_BLOCKS[kind], ready)

    def _open(self, kind: str, block: dict[str, Any], ready: list[bytes]) -> None:
        self._block = kind
        ready.append(_event("content_block_start", {"index": self._blocks, "content_block": block}))

    def _close(self, ready: list[bytes]) -> None:
        """End the open block, and write the text that waited for it."""
        if self._block == "thinking":
            # Claude Code discards an answer whose thinking has no signature
            ready.append(_DELTA % (self._blocks, _SIGNATURE % _encode(signature(self.tokens))))
        if self._block:
            ready.append(_event("content_block_stop", {"index": self._blocks}))
            self._block = ""
            self._blocks += 1
        if any(map(str.strip, self._late)):  # white space between calls is no answer; it waits for more
            self._open("text", _EMPTY_BLOCKS["text"], ready)
            self._write_late(ready)
            self._close(ready)

    def _write_late(self, ready: list[bytes]) -> None:
        ready.append(_DELTA % (self._blocks, _TEXT % _encode("".join(self._late))))
        self._late.clear()


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))
