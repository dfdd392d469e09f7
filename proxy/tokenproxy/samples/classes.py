"""The classes of the turns of a rollout: what its client stated, else what structure proves.

Law: what a client stated is never changed, and a turn of which nothing is certain has no class. The rules for
turns without a stated class, of which the first that applies decides:

    compaction  the last message asks for a summary in the words of a known program
    auxiliary   a first turn with one message and no tools, for a model whose name says that it is a small
                one and that was mapped to another (`model_aliases`)
    subagent    a first turn with tools, whose system message and first user message both differ from those
                of the session's first turn with tools. System messages that begin alike do not differ: what
                programs put at their end changes within a conversation
    as parent   a turn that continues a turn of a sub-agent or a workflow
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from tokenproxy.record.origin import RequestClass
from tokenproxy.record.turn import Turn
from tokenproxy.samples.tree import parsed

UNKNOWN = "unknown"
"""The word that selects turns without a class."""

_SMALL = ("haiku", "small", "mini", "flash", "nano")
"""Parts of the names of models that programs use for side calls."""
_SUMMARIES = (
    "Your task is to create a detailed summary of the conversation so far",  # Claude Code
    "Your task is to create a detailed summary of this conversation",  # Claude Code
    "Your task is to create a detailed summary of the RECENT portion of the conversation",  # Claude Code
    "You are performing a CONTEXT CHECKPOINT COMPACTION",  # Codex
)
_ALIKE = 0.5
"""Share of the shorter of two system messages with which both begin, from which they do not differ."""
OF_AGENTS = (RequestClass.SUBAGENT, RequestClass.WORKFLOW)
_SYSTEM_ROLES = ("system", "developer")


def classes_of(turns: Sequence[Turn]) -> dict[str, str]:
    """The class of each turn of a rollout, by its id; empty if unknown.

    Args:
        turns: all turns of the rollout, in any order.
    """
    in_order = sorted(turns, key=lambda turn: turn.id)
    classes = {turn.id: turn.request_class for turn in in_order}
    if all(classes.values()):
        return classes
    mains = (turn for turn in in_order if turn.request_class in ("", RequestClass.MAIN) and _opens(turn))
    first = next(map(Opening.of, mains), None)
    for turn in in_order:  # ids sort by time: a parent comes before its children, unless clocks disagree
        if not turn.request_class:
            classes[turn.id] = _derived(turn, first, classes)
    return classes


def selected(turns: Sequence[Turn], wanted: Collection[str]) -> list[Turn]:
    """The turns with the wanted ids, and those that they continue."""
    by_id = {turn.id: turn for turn in turns}
    kept: set[str] = set()
    for turn in turns:
        if turn.id not in wanted:
            continue
        before: Turn | None = turn
        while before is not None and before.id not in kept:
            kept.add(before.id)
            before = by_id.get(before.parent or "")
    return [turn for turn in turns if turn.id in kept]


def agents_of(turns: Sequence[Turn], classes: Mapping[str, str]) -> list[dict[str, Any]]:
    """The agents of a rollout, in the order of their first turns.

    Args:
        classes: those of `classes_of`.

    Returns:
        `id` (None for the first agent of the session, and for turns whose agent is unknown), `parent` (the id
        of the agent that started it; None for the first one), `classes`, `turns` (their number),
        `first_turn` (its id).
    """
    agents: dict[str, dict[str, Any]] = {}
    for turn in sorted(turns, key=lambda turn: turn.id):
        agent = agents.setdefault(
            turn.agent,
            {"id": turn.agent or None, "parent": None, "classes": [], "turns": 0, "first_turn": turn.id},
        )
        agent["turns"] += 1
        agent["parent"] = agent["parent"] or turn.parent_agent or None
        if (name := classes[turn.id]) and name not in agent["classes"]:
            agent["classes"].append(name)
    return list(agents.values())


class Opening(msgspec.Struct, frozen=True):
    """How a conversation begins."""

    system: str
    """The text of the system messages with which it begins: later ones change within a conversation."""
    user: str
    """That of its first user message."""
    messages: int
    """The number of its other messages."""

    @classmethod
    def of(cls, turn: Turn) -> "Opening | None":
        """The opening of a first turn; None if its messages cannot be read."""
        messages = parsed(turn.messages, list[dict[str, Any]])
        if messages is None:
            return None
        first = takewhile(lambda each: each.get("role") in _SYSTEM_ROLES, messages)
        system = [text_of(each) for each in first]
        others = [each for each in messages if each.get("role") not in _SYSTEM_ROLES]
        user = next((text_of(each) for each in others if each.get("role") == "user"), "")
        return cls("\n".join(system), user, len(others))


def _derived(turn: Turn, first: Opening | None, classes: Mapping[str, str]) -> str:
    if _asks_for_summary(turn):
        return RequestClass.COMPACTION
    if turn.parent is not None:
        inherited = classes.get(turn.parent, "")
        return inherited if inherited in OF_AGENTS else ""
    opening = Opening.of(turn)
    if opening is None:
        return ""
    if not _opens(turn):
        small = any(part in turn.requested_model.lower() for part in _SMALL)
        return RequestClass.AUXILIARY if small and opening.messages == 1 else ""
    if first is None or not first.system or not opening.system:
        return ""
    if differ(opening.system, first.system) and opening.user != first.user:
        return RequestClass.SUBAGENT
    return ""


def differ(one: str, other: str) -> bool:
    """Whether two system messages are those of different agents."""
    alike = int(_ALIKE * min(len(one), len(other)))
    return one[:alike] != other[:alike]


def _opens(turn: Turn) -> bool:
    """Whether a turn begins the conversation of an agent: a first turn, with tools."""
    return turn.parent is None and turn.tools not in (None, b"", b"[]")


def _asks_for_summary(turn: Turn) -> bool:
    # most turns need not be parsed: the words are ASCII without quotes, so JSON holds them as they are
    if not any(words.encode() in turn.messages for words in _SUMMARIES):
        return False
    messages = parsed(turn.messages, list[dict[str, Any]])
    if not messages or messages[-1].get("role") != "user":
        return False
    last = text_of(messages[-1])
    return any(words in last for words in _SUMMARIES)


def text_of(message: dict[str, Any]) -> str:
    """The text of a message, its parts joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))
