"""Writes the response: a message, or the events of its stream.

    message_start
    content_block_start, content_block_delta ..., content_block_stop      for each block, one after the other
    message_delta                                                         once, with stop reason and usage
    message_stop

The blocks come in the order in which the model writes them. Text while a tool call is written waits until the
call is complete, because blocks do not overlap.
"""

import secrets
from typing import Any, ClassVar

import msgspec

from tokenproxy.base.errors import EngineBroken, anthropic_error
from tokenproxy.formats.translated import Translation
from tokenproxy.turn import wire

_encode = msgspec.json.encode
_is_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_is_json = msgspec.json.Decoder(msgspec.Raw).decode
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
        super().__init__()
        self._model = model
        self._stop: int | str | None = None
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

    # --- a whole message

    def message(self, choice: wire.Choice) -> bytes:
        """See `Translation.message`. Raises EngineBroken."""
        self._check_ended()
        answer = choice.said
        blocks: list[dict[str, Any]] = []
        if thought := self.thought(answer):
            blocks.append({"type": "thinking", "thinking": thought, "signature": self._signature()})
        if text := wire.text_of(answer):
            blocks.append({"type": "text", "text": text})
        calls = list(wire.calls_of(answer))
        for item, call in enumerate(calls):
            block = {"type": "tool_use", "id": self._call_id(call, item), "name": call.name}
            blocks.append({**block, "input": _input(call.arguments or "")})
        reason, sequence = stop_reason(
            self.finish, choice.stop_reason, tool_used=bool(calls), tool_complete=bool(calls)
        )
        return _encode(
            {
                **self._empty_message(),
                # as Anthropic's API: clients read the first block without looking
                "content": blocks or [_EMPTY_BLOCKS["text"]],
                "stop_reason": reason,
                "stop_sequence": sequence,
            }
        )

    # --- a stream

    def start(self) -> bytes:
        """See `Translation.start`."""
        return _event("message_start", {"message": self._empty_message()})

    def piece(self, choice: wire.Choice) -> bytes:
        """See `Translation.piece`."""
        if choice.finish_reason is not None:
            self._stop = choice.stop_reason
        ready: list[bytes] = []
        delta = choice.said
        if thought := self.thought(delta):
            self._continue("thinking", ready)
            ready.append(_DELTA % (self._blocks, _THINKING % _encode(thought)))
        if text := wire.text_of(delta):
            writes = self._block != "tool_use"
            if writes:
                self._continue("text", ready)
            self._late.append(text)
            if writes:
                self._write_late(ready)
        for call in wire.calls_of(delta):
            self._add_call(call, ready)
        return b"".join(ready)

    def finished(self) -> bytes:
        """See `Translation.finished`. Raises EngineBroken."""
        self._check_ended()
        ready: list[bytes] = []
        self._close(ready)
        if not self._blocks:
            self._continue("text", ready)
            self._close(ready)
        complete = self._calls > 0 and _is_complete("".join(self._arguments))
        reason, sequence = stop_reason(
            self.finish or "stop", self._stop, tool_used=self._calls > 0, tool_complete=complete
        )
        delta = {"container": None, "stop_reason": reason, "stop_sequence": sequence, "stop_details": None}
        ready.append(_event("message_delta", {"delta": delta, "usage": self._usage_so_far()}))
        ready.append(_event("message_stop", {}))
        return b"".join(ready)

    def _add_call(self, call: wire.CallPiece, ready: list[bytes]) -> None:
        continues = self._block == "tool_use" and self._call == call.position
        if call.name and not (continues and not call.id):
            self._close(ready)
            block = {"type": "tool_use", "id": self._call_id(call, self._calls), "name": call.name}
            self._open("tool_use", {**block, "input": {}}, ready)
            self._calls, self._call = self._calls + 1, call.position
            self._arguments, self._is_object = [], False
            continues = True
        if not call.arguments or not continues:
            return
        piece = call.arguments
        self._arguments.append(piece)
        if not self._is_object:  # nothing is sent of arguments that are no object: the SDK could not parse it
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
            ready.append(_DELTA % (self._blocks, _SIGNATURE % _encode(self._signature())))
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

    # --- errors

    def error(self, status: int, message: str, code: str | None) -> bytes:
        """See `Translation.error`."""
        return anthropic_error(status, message)

    def failed(self, status: int, message: str, code: str | None) -> bytes:
        """See `Translation.failed`."""
        return b"event: error\ndata: " + anthropic_error(status, message) + b"\n\n"

    def _check_ended(self) -> None:
        """Check that the engine ended the turn. The format has no stop reason for one that it did not end.

        Raises:
            EngineBroken: it did not.
        """
        if self.broken_off:
            raise EngineBroken(self.broken_off)

    # --- parts of both

    def _empty_message(self) -> dict[str, Any]:
        """A message without content, with all fields that clients read."""
        return {
            # the id of its turn; of a turn that is not recorded, the engine's or a random one
            "id": f"msg_{self.turn_id or self.head.id or secrets.token_hex(16)}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "container": None,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": {
                **self._usage_so_far(),
                "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
                "service_tier": "standard",
                "inference_geo": None,
                "speed": None,
            },
        }

    def _usage_so_far(self) -> dict[str, Any]:
        """The usage in a `message_delta`. Ids that the engine had in its cache are no `input_tokens`."""
        cached, thinking = self.usage.cached_tokens or 0, self.usage.reasoning_tokens
        return {
            "input_tokens": max(0, self.usage.prompt_tokens - cached),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.usage.completion_tokens or 0,
            "output_tokens_details": None if thinking is None else {"thinking_tokens": thinking},
            "server_tool_use": None,
        }

    def _signature(self) -> str:
        """The signature of the turn's thinking. Claude Code discards an answer whose thinking has none."""
        return self.tokens.token() if self.tokens is not None else "unsigned"

    def _call_id(self, call: wire.CallPiece, item: int) -> str:
        """The id under which the client gets a tool call; `item` is its index in the answer."""
        own = call.id or f"toolu_{secrets.token_hex(12)}"
        return self.tokens.call_id(own, item) if self.tokens is not None else own


def stop_reason(
    finish_reason: str | None, stop: int | str | None, *, tool_used: bool, tool_complete: bool
) -> tuple[str | None, str | None]:
    """The stop reason and the stop sequence, as vLLM derives them.

    Args:
        tool_used: whether the model called a tool; a forced call ends with the reason `stop`.
        tool_complete: whether its last call is complete. A call that a stop sequence cut must not run.
    """
    if finish_reason == "length":
        return "max_tokens", None
    if finish_reason not in ("stop", "tool_calls"):
        return None, None
    if tool_complete:
        return "tool_use", None
    if isinstance(stop, str):
        return "stop_sequence", stop
    return ("tool_use" if finish_reason == "tool_calls" or tool_used else "end_turn"), None


def _input(arguments: str) -> msgspec.Raw | dict[str, Any]:
    """The arguments as an object, spelled as they were sampled; empty if they are no object."""
    try:
        _is_object(arguments)
    except msgspec.DecodeError:
        return {}
    return msgspec.Raw(arguments.encode())


def _is_complete(text: str) -> bool:
    """Whether a text is a complete JSON value."""
    try:
        _is_json(text)
    except msgspec.DecodeError:
        return False
    return True


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))
