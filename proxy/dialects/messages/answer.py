"""Whole answers: content blocks, stop reason and usage, of a chat completion."""

import secrets
from typing import Any

import msgspec

from proxy.dialects.chat_parts import CallPart, Chat, ChoicePart, UsagePart
from proxy.errors import EngineBroken
from proxy.history.echo import TurnTokens
from proxy.history.vocabulary import BROKEN_OFF

_UNSIGNED = "unsigned"
_is_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_is_json = msgspec.json.Decoder(msgspec.Raw).decode


def message(completion: Chat, model: str, turn_id: str, tokens: TurnTokens | None) -> dict[str, Any]:
    """The message for a whole completion; of several choices, the first.

    Args:
        model: the name that the client used.
        tokens: makes what the client sends back unread; None for a turn that is not recorded.

    Raises:
        EngineBroken: the engine did not end the turn.
    """
    choice = completion.choices[0] if completion.choices else ChoicePart()
    check_ended(choice.finish_reason)
    calls = (choice.message.tool_calls if choice.message else None) or []
    reason, sequence = stop_reason(
        choice.finish_reason, choice.stop_reason, tool_used=bool(calls), tool_complete=bool(calls)
    )
    return {
        **empty_message(message_id(turn_id, completion.id), model),
        "content": _content(choice, tokens),
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": usage(completion.usage),
    }


def empty_message(identity: str, model: str) -> dict[str, Any]:
    """A message without content, with all fields that clients read."""
    return {
        "id": identity,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "container": None,
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
    }


def check_ended(finish_reason: str | None) -> None:
    """Check that the engine ended a turn itself. The format has no stop reason for one that it did not end.

    Raises:
        EngineBroken: it did not.
    """
    if finish_reason in BROKEN_OFF:
        raise EngineBroken(f"the engine ended the turn before it was complete ({finish_reason})")


def message_id(turn_id: str, completion_id: str = "") -> str:
    """The id of a message: that of its turn; of a turn that is not recorded, the engine's or a random one."""
    return f"msg_{turn_id or completion_id or secrets.token_hex(16)}"


def _content(choice: ChoicePart, tokens: TurnTokens | None) -> list[dict[str, Any]]:
    answer = choice.message
    if answer is None:
        return [{"type": "text", "text": ""}]
    blocks: list[dict[str, Any]] = []
    if answer.thought:
        blocks.append({"type": "thinking", "thinking": answer.thought, "signature": signature(tokens)})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    for item, call in enumerate(answer.tool_calls or []):
        name, arguments = _function(call)
        identity = call_id(call, item, tokens)
        blocks.append({"type": "tool_use", "id": identity, "name": name, "input": _input(arguments)})
    # as Anthropic's API: clients read the first block without looking
    return blocks or [{"type": "text", "text": ""}]


def signature(tokens: TurnTokens | None) -> str:
    """The signature of a turn's thinking. Clients discard thinking without one."""
    return tokens.token() if tokens is not None else _UNSIGNED


def call_id(call: CallPart, item: int, tokens: TurnTokens | None) -> str:
    """The id under which the client gets a tool call.

    Args:
        item: index of the call in the answer.
    """
    own = call.id or f"toolu_{secrets.token_hex(12)}"
    return tokens.call_id(own, item) if tokens is not None else own


def _function(call: CallPart) -> tuple[str, str]:
    function = call.function
    return (function.name or "", function.arguments or "") if function else ("", "")


def _input(arguments: str) -> msgspec.Raw | dict[str, Any]:
    """The arguments as an object, spelled as they were sampled; empty if they are no object."""
    try:
        _is_object(arguments)
    except msgspec.DecodeError:
        return {}
    return msgspec.Raw(arguments.encode())


def is_json(text: str) -> bool:
    """Whether a text is a complete JSON value."""
    try:
        _is_json(text)
    except msgspec.DecodeError:
        return False
    return True


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


def usage(part: UsagePart | None) -> dict[str, Any]:
    """The usage in a message, with all keys that clients read."""
    return {
        **usage_so_far(part),
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "service_tier": "standard",
        "inference_geo": None,
        "speed": None,
    }


def usage_so_far(part: UsagePart | None) -> dict[str, Any]:
    """The usage in a `message_delta`. Ids that the engine had in its cache do not count as `input_tokens`."""
    part = part or UsagePart()
    cached = part.cached_tokens or 0
    details = part.completion_tokens_details
    thinking = details.reasoning_tokens if details else None
    return {
        "input_tokens": max(0, part.prompt_tokens - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": part.completion_tokens or 0,
        "output_tokens_details": None if thinking is None else {"thinking_tokens": thinking},
        "server_tool_use": None,
    }
