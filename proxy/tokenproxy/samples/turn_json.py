"""Sessions and turns as JSON: what `/v1/sessions/{session}` and the viewer show, and what rLLM reads."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import msgspec

from tokenproxy.record.store import Session
from tokenproxy.record.turn import Turn, unpack_ids, unpack_logprobs
from tokenproxy.samples.chains import Link, links_of
from tokenproxy.samples.classes import agents_of, classes_of
from tokenproxy.samples.tree import path_of

_split = msgspec.json.Decoder(list[msgspec.Raw]).decode


def stored_json(stored: bytes, instead: bytes) -> msgspec.Raw:
    """Stored JSON as it is; something else if it is damaged: the rest of a response can be read."""
    try:
        stored.decode()
        msgspec.json.decode(stored, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.Raw(instead)
    return msgspec.Raw(stored)


def session_fields(session: Session) -> dict[str, Any]:
    """The fields of a session that every list of sessions shows."""
    return {
        "id": session.name,
        "explicit": session.explicit,
        "ambiguous": session.ambiguous,
        "created": session.created,
        "used": session.used,
        "turn_count": session.turns,
        "sampled_ids": session.sampled_ids,
        "bytes": session.size,
    }


def shown_turns(
    turns: Sequence[Turn], shown: Iterable[Turn], more: Callable[[Turn], dict[str, Any]]
) -> dict[str, Any]:
    """The agents of a session, and the fields of some of its turns.

    Args:
        turns: all turns of the session.
        more: further fields of a turn.
    """
    classes = classes_of(turns)
    links = links_of(turns, classes)
    fields = [{**turn_fields(turn, classes[turn.id], links[turn.id]), **more(turn)} for turn in shown]
    return {"agents": agents_of(turns, classes), "turns": fields}


def turn_fields(turn: Turn, request_class: str, link: Link) -> dict[str, Any]:
    """The fields of a turn. What is unknown is None.

    Args:
        request_class: as `classes_of` finds it.
        link: as `links_of` finds it.
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
        "off_policy": list(turn.off_policy),
        "after_finish": turn.after_finish,
        "request_class": request_class or None,
        "agent": turn.agent or None,
        "parent_agent": turn.parent_agent or None,
        "continues": link.continues or None,
        "segment": link.number,
        "problem": turn.problem or None,
        "messages": stored_json(turn.messages, b"[]"),
        "message": stored_json(turn.message, b"{}"),
    }


def traces_of(
    turns: Sequence[Turn], session: str, *, since: float = 0.0, limit: int | None = None
) -> list[dict[str, Any]]:
    """The fields of rLLM's `TraceRecord` for each turn whose whole prompt is there.

    Source: rllm-model-gateway 0.1.0, rllm_model_gateway/models.py.

    Args:
        turns: all turns of the session.
        session: the session's name.
        since: leaves out turns that were created before, in seconds since the epoch.
        limit: of traces; None for all.
    """
    by_id = {turn.id: turn for turn in turns}
    paths = (path_of(turn, by_id) for turn in turns if turn.created >= since)
    whole = (path for path in paths if path[0].parent is None)
    return [_trace(path, session) for path in islice(whole, limit)]


def _trace(path: Sequence[Turn], session: str) -> dict[str, Any]:
    turn = path[-1]
    prompt: list[int] = []
    messages: list[msgspec.Raw] = []
    for before in path[:-1]:
        prompt += [*unpack_ids(before.appended), *unpack_ids(before.completion)]
        messages += [*_split(stored_json(before.messages, b"[]")), stored_json(before.message, b"{}")]
    return {
        "trace_id": turn.id,
        "session_id": session,
        "model": turn.model,
        "messages": [*messages, *_split(stored_json(turn.messages, b"[]"))],
        "prompt_token_ids": [*prompt, *unpack_ids(turn.appended)],
        "response_message": stored_json(turn.message, b"{}"),
        "completion_token_ids": unpack_ids(turn.completion),
        "logprobs": unpack_logprobs(turn.logprobs) if turn.logprobs else None,
        "finish_reason": turn.finish_reason,
        "token_counts": {"prompt": turn.prompt_tokens, "completion": turn.completion_tokens},
        "timestamp": turn.created,
        "metadata": {"parent": turn.parent, "problem": turn.problem or None},
    }
