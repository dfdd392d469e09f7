"""Writes the response: a message, or the events of its stream.

    message_start
    content_block_start, content_block_delta ..., content_block_stop      for each block, one after the other
    message_delta                                                         once, with stop reason and usage
    message_stop

The blocks come in the order in which the model writes them, and do not overlap: see `formats.blocks`.
"""

import secrets
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from tokenproxy.base.errors import EngineBroken, anthropic_error
from tokenproxy.formats.blocks import Blocks, Call, Logprobs, is_object
from tokenproxy.formats.translated import Translation
from tokenproxy.turn import wire

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
        super().__init__()
        self._model = model
        self._stop: int | str | None = None
        self._content = _Content(self._call_id, self._signature)

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
            block = {"type": "tool_use", "id": self._call_id(call.id, item), "name": call.name}
            blocks.append({**block, "input": _input(call.arguments or "")})
        complete = bool(calls) and all(is_object(call.arguments or "") for call in calls)
        reason, sequence = stop_reason(
            self.finish, wire.stop_reason_of(choice), tool_used=bool(calls), tool_complete=complete
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
        if choice.finish_reason:
            self._stop = wire.stop_reason_of(choice)
        ready: list[bytes] = []
        delta = choice.said
        if thought := self.thought(delta):
            self._content.add_text("thinking", thought, ready)
        if text := wire.text_of(delta):
            self._content.add_text("text", text, ready)
        for call in wire.calls_of(delta):
            self._content.add_call(call, ready)
        return b"".join(ready)

    def finished(self) -> bytes:
        """See `Translation.finished`. Raises EngineBroken."""
        self._check_ended()
        ready: list[bytes] = []
        self._content.end("completed", ready)
        calls = self._content.calls.values()
        complete = bool(calls) and all(call.complete for call in calls)
        reason, sequence = stop_reason(
            self.finish or "stop", self._stop, tool_used=bool(calls), tool_complete=complete
        )
        delta = {"container": None, "stop_reason": reason, "stop_sequence": sequence, "stop_details": None}
        ready.append(_event("message_delta", {"delta": delta, "usage": self._usage_so_far()}))
        ready.append(_event("message_stop", {}))
        return b"".join(ready)

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

    def _call_id(self, call: str, item: int) -> str:
        """The id under which the client gets a tool call, of the engine's; `item` is its index."""
        if self.tokens is not None:
            return self.tokens.call_id(call, item)
        return call or f"toolu_{secrets.token_hex(12)}"


class _Content(Blocks[bytes]):
    """The content of a streamed message."""

    empty = "text"
    keeps_blank = False

    def __init__(self, call_id: Callable[[str, int], str], signature: Callable[[], str]) -> None:
        super().__init__()
        self._call_id = call_id
        self._signature = signature
        self._index = 0
        """Of the open block."""
        self._is_object = False
        """Whether the arguments of the open call begin as an object does, and are sent."""

    def _start(self, block: str | Call, sent: list[bytes]) -> None:
        if isinstance(block, Call):
            self._is_object = False
            name = self._call_id(block.id, block.item)
            shown = {"type": "tool_use", "id": name, "name": block.name, "input": {}}
        else:
            shown = _EMPTY_BLOCKS[block]
        sent.append(_event("content_block_start", {"index": self._index, "content_block": shown}))

    def _text(self, kind: str, text: str, logprobs: Logprobs, sent: list[bytes]) -> None:
        sent.append(_DELTA % (self._index, (_TEXT if kind == "text" else _THINKING) % _encode(text)))

    def _arguments(self, call: Call, arguments: str, sent: list[bytes]) -> None:
        if not self._is_object:  # nothing is sent of arguments that are no object: the SDK could not parse it
            arguments = "".join(call.pieces).lstrip()
            self._is_object = arguments.startswith("{")
        if self._is_object:
            sent.append(_DELTA % (self._index, _ARGUMENTS % _encode(arguments)))

    def _stop(self, block: str | Call, status: str, sent: list[bytes]) -> None:
        if block == "thinking":
            sent.append(_DELTA % (self._index, _SIGNATURE % _encode(self._signature())))
        sent.append(_event("content_block_stop", {"index": self._index}))
        self._index += 1


def stop_reason(
    finish_reason: str | None, stop: int | str | None, *, tool_used: bool, tool_complete: bool
) -> tuple[str | None, str | None]:
    """The stop reason and the stop sequence, as vLLM derives them.

    Args:
        tool_used: whether the model called a tool; a forced call ends with the reason `stop`.
        tool_complete: whether its calls are complete. A call that a stop sequence cut must not run.
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
    return msgspec.Raw(arguments.encode()) if is_object(arguments) else {}


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))
