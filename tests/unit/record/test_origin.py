"""The agent and the class of a request, from the headers of the real programs."""

import json

import pytest

from tokenproxy.base.types import Headers
from tokenproxy.record.origin import Origin, origin_of

_CLASS = b"x-claude-code-request-class"


def _codex(subagent: str = "", parent: str = "", thread: str = "s", **turn: str) -> Headers:
    """As Codex 0.169.0 sends them."""
    metadata = {"thread_id": thread, "request_kind": "turn", "thread_source": "user", **turn}
    headers = [
        (b"session-id", b"s"),
        (b"thread-id", thread.encode()),
        (b"x-codex-turn-metadata", json.dumps(metadata).encode()),
        (b"x-codex-parent-thread-id", parent.encode()),
        (b"x-openai-subagent", subagent.encode()),
    ]
    return [(name, value) for name, value in headers if value]


_PARENT = (b"x-claude-code-parent-agent-id", b"a1")
_SPAWNED = {"thread": "t", "parent": "s", "thread_source": "subagent"}


@pytest.mark.parametrize(
    "headers, origin",
    [
        ([(b"session-id", b"s"), (b"thread-id", b"t")], Origin()),  # not Codex
        ([(_CLASS, b"main")], Origin("main")),
        ([(b"x-claude-code-agent-id", b"a2"), _PARENT], Origin("subagent", "a2", "a1")),
        (_codex(), Origin("main")),
        (_codex(**_SPAWNED), Origin("subagent", "t", "")),
        (_codex(**_SPAWNED, request_kind="compaction"), Origin("compaction", "t", "")),
        (_codex(subagent="compact"), Origin("compaction")),
        (_codex(subagent="memory_consolidation"), Origin("auxiliary")),
        ([*_codex(), (_CLASS, b"mine")], Origin("mine")),
        ([(b"x-codex-turn-metadata", b"{"), (b"session-id", b"s"), (b"thread-id", b"t")], Origin("", "t")),
    ],
)
def test_origins(headers: Headers, origin: Origin) -> None:
    assert origin_of(headers) == origin
    assert origin_of(headers[::-1]) == origin


def test_values_are_bounded() -> None:
    headers = [(_CLASS, b"c" * 500), (b"x-claude-code-agent-id", b"a" * 500)]
    assert origin_of(headers) == Origin("c" * 100, "a" * 100)
