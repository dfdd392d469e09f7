"""Which of a program's agents sent a request, and what for: read from the headers that coding agents send.

Only what a program says is recorded. What structure tells besides is derived when the turns are read: see
`tokenproxy.samples.classes`.
"""

import re
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple

import msgspec

from tokenproxy.base.types import Headers

_LENGTH = 100
"""Most characters of a recorded value."""
_PROBE = re.compile(rb"[\w.-]*probe/[\w.-]+", re.IGNORECASE)
"""A User-Agent that is one product, whose name ends in `probe`: `OpenEnv-provider-probe/1.0`."""
_THREAD, _PARENT_THREAD, _SESSION = b"thread-id", b"x-codex-parent-thread-id", b"session-id"
_SUBAGENT, _METADATA = b"x-openai-subagent", b"x-codex-turn-metadata"
_CLASS = b"x-claude-code-request-class"
"""The class of a request, as Claude Code names it; any client may."""
_AGENT, _PARENT_AGENT = b"x-claude-code-agent-id", b"x-claude-code-parent-agent-id"
_NAMES = frozenset({_THREAD, _PARENT_THREAD, _SESSION, _SUBAGENT, _METADATA, _CLASS, _AGENT, _PARENT_AGENT})


class RequestClass(StrEnum):
    """What a coding agent sends a request for. Programs may name others."""

    MAIN = "main"
    """A turn of the conversation that the program was started for."""
    SUBAGENT = "subagent"
    """A turn of an agent that another agent started."""
    WORKFLOW = "workflow"
    """A turn of an agent that a script of the program started."""
    COMPACTION = "compaction"
    """The summary that replaces a history."""
    AUXILIARY = "auxiliary"
    """A side call, as for a title."""


_CODEX_SUBAGENTS = {"compact": RequestClass.COMPACTION, "memory_consolidation": RequestClass.AUXILIARY}
"""The class of a value of `x-openai-subagent`; of every other value it is `subagent`."""


class Origin(NamedTuple):
    """The agent that sent a request, and what for. Empty strings are unknown."""

    request_class: str = ""
    """A `RequestClass`, or the client's own word."""
    agent: str = ""
    """The client's id of the agent; empty for the first agent of a session too."""
    parent_agent: str = ""
    """The agent that started it; empty if that is the first one of the session."""


class _CodexTurn(msgspec.Struct):
    """What is read of `x-codex-turn-metadata`."""

    request_kind: str = ""
    thread_source: str = ""
    session_id: str = ""
    thread_id: str = ""
    parent_thread_id: str = ""


def is_probe(headers: Headers) -> bool:
    """Whether a program sent a request to find out what the server can do, as its User-Agent says.

    OpenEnv sends three to each engine before its rollouts, to none of which they belong.
    """
    agents = [value for name, value in headers if name == b"user-agent"]
    return any(map(_PROBE.fullmatch, agents))


def origin_of(headers: Headers) -> Origin:
    """The origin of a request."""
    # the first of headers with one name decides
    values = {name: value for name, value in reversed(headers) if value and name in _NAMES}
    if not values:
        return Origin()
    stated = _text(values.get(_CLASS, b""))
    if agent := _text(values.get(_AGENT, b"")):
        return Origin(stated or RequestClass.SUBAGENT, agent, _text(values.get(_PARENT_AGENT, b"")))
    if _METADATA in values or _SUBAGENT in values or _PARENT_THREAD in values:
        codex = _codex(values)
        return Origin(stated or codex.request_class, codex.agent, codex.parent_agent)
    return Origin(stated)


def _codex(values: dict[bytes, bytes]) -> Origin:
    """The origin of a request of Codex: its agents are threads, the first of which has the session's id."""
    turn = _CodexTurn()
    with suppress(
        msgspec.DecodeError, UnicodeDecodeError, RecursionError
    ):  # of another version: the other headers remain
        turn = msgspec.json.decode(values.get(_METADATA, b"{}"), type=_CodexTurn)
    first = _text(values.get(_SESSION, b"")) or _short(turn.session_id)
    agent = _text(values.get(_THREAD, b"")) or _short(turn.thread_id)
    parent = _text(values.get(_PARENT_THREAD, b"")) or _short(turn.parent_thread_id)
    return Origin(
        _codex_class(_text(values.get(_SUBAGENT, b"")), turn, parent),
        "" if agent == first else agent,
        "" if parent == first else parent,
    )


def _codex_class(subagent: str, turn: _CodexTurn, parent: str) -> str:
    if turn.request_kind == RequestClass.COMPACTION:
        return RequestClass.COMPACTION
    if subagent:
        return _CODEX_SUBAGENTS.get(subagent, RequestClass.SUBAGENT)
    if parent or turn.thread_source == RequestClass.SUBAGENT:
        return RequestClass.SUBAGENT
    return RequestClass.MAIN if (turn.request_kind, turn.thread_source) == ("turn", "user") else ""


def _text(value: bytes) -> str:
    return _short(value.decode("latin-1"))


def _short(text: str) -> str:
    return text.strip()[:_LENGTH]
