"""A turn as JSON, without its ids: what `/v1/sessions/{session}` returns, and the viewer's page reads."""

from typing import Any

import msgspec

from proxy.history.turn import Turn


def turn_fields(turn: Turn, request_class: str) -> dict[str, Any]:
    """The fields of a turn. What is unknown is None.

    Args:
        request_class: as `classes_of` finds it.
    """
    appended = len(turn.appended) // 4
    return {
        "id": turn.id,
        "parent": turn.parent,
        "request": turn.request,
        "choice": turn.choice,
        "created": turn.created,
        "model": turn.model,
        "requested_model": turn.requested_model or None,
        "source": turn.source,
        "reason": turn.reason or None,
        "reused": turn.prompt_tokens - appended,
        "appended": appended,
        "prompt_tokens": turn.prompt_tokens,
        "cached_tokens": turn.cached_tokens,
        "completion_tokens": turn.completion_tokens,
        "finish_reason": turn.finish_reason,
        "stop_reason": turn.stop_reason,
        "temperature": turn.temperature,
        "request_class": request_class or None,
        "agent": turn.agent or None,
        "parent_agent": turn.parent_agent or None,
        "problem": turn.problem or None,
        "messages": msgspec.Raw(turn.messages),
        "message": msgspec.Raw(turn.message),
    }
