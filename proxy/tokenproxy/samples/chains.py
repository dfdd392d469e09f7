"""The chains of a rollout: which turn caused a new conversation, as a summary that replaces a history does.

Law: a first turn continues an earlier turn only if its messages hold what that turn sampled, as one of

    a text      at least 120 bytes of the turn's content, in messages but for those of assistants and tools
    a copy      the last assistant's message is the turn's: the history went on edited, or with other tools

and nothing contradicts it: both belong to one agent, their system messages begin alike, the new conversation
goes on longer than the old one, as that of a sub-agent does not, and no other request sent the text before.
Text that the turn also wrote into the arguments of a call was given to a tool, as the prompt of a sub-agent,
and does not count. Side calls, and sub-agents that no client names, are in no chain.

Texts come first: a copy next to one is a kept message, unless its turn came after that of the text. Of
several turns, the latest counts, provided that it continues all others in its chain. If it does not, as for
two turns with the same text, nothing decides, and the first turn begins a chain of its own.

Texts are compared in phrases, such as sentences and lines, because programs take summaries out of their tags
and put words around them. That takes time linear in the texts.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from chat_tokenizer import InvalidMessages
from chat_tokenizer.equivalences import NO_EQUIVALENTS
from tokenproxy.record.identity import digest_message
from tokenproxy.record.origin import RequestClass
from tokenproxy.record.turn import Turn
from tokenproxy.samples.classes import OF_AGENTS, Opening, differ, text_of
from tokenproxy.samples.tree import parsed

_MARKS, _STOPS = b'<>()[]{}"`*#|\\\t\r', b".:;!?-"
_PUNCTUATION = bytes.maketrans(_MARKS + _STOPS, b"\n" * len(_MARKS) + b"." * len(_STOPS))
"""Marks end a phrase; stops do only before white space: `src/parser.py` is a part of one."""
_PHRASE_BYTES = 8
"""Shorter phrases are not compared."""
_ENOUGH_BYTES = 120
"""Phrases of together so many bytes are not sampled twice by chance."""


class Link(NamedTuple):
    """The place of a turn in a chain of conversations."""

    number: int = 0
    """Position in the chain."""
    continues: str = ""
    """The turn that caused it, if this turn is its first; empty for others, and if it begins the chain."""


def links_of(turns: Sequence[Turn], classes: Mapping[str, str]) -> dict[str, Link]:
    """The place of each turn of a rollout in its chain, by its id.

    Args:
        turns: all turns of the rollout, in any order.
        classes: those of `classes_of`.
    """
    in_order = sorted(turns, key=lambda turn: turn.id)
    links = {turn.id: Link() for turn in in_order}
    told = [turn for turn in in_order if classes[turn.id] != RequestClass.AUXILIARY]
    if sum(turn.parent is None for turn in told) < 2:  # the usual rollout: nothing is read
        return links
    chains = _Chains(told, classes)
    for turn in told:
        cause = chains.add(turn)
        if cause:
            links[turn.id] = Link(links[cause].number + 1, cause)
        elif turn.parent in links:
            links[turn.id] = Link(links[turn.parent].number)
    return links


class _Calls(msgspec.Struct):
    """The tool calls of a message as JSON, not parsed: a model may nest them deeply."""

    tool_calls: msgspec.Raw = msgspec.Raw(b"")


class _Agent(NamedTuple):
    """Who holds a conversation, and how it began."""

    name: str
    """The client's name of the agent; the class of a sub-agent without a name; else empty."""
    opening: Opening | None

    def may_continue(self, before: "_Agent") -> bool:
        """Whether this conversation may be a segment after another one."""
        if self.name != before.name or self.name in OF_AGENTS or not self.opening or not before.opening:
            return False
        system, now = before.opening.system, self.opening.system
        return not system or (now != "" and not differ(system, now))


class _Chains:
    """The causes of first turns, found while the turns of a rollout are added in the order of their ids."""

    def __init__(self, turns: Sequence[Turn], classes: Mapping[str, str]) -> None:
        """`turns`: those that will be added."""
        self._classes = classes
        self._parents = {turn.id: turn.parent for turn in turns}
        self._last = {turn.id: turn.id for turn in turns}
        """For each turn the latest of it and those that continue it."""
        for turn in reversed(turns):
            if turn.parent in self._last:
                self._last[turn.parent] = max(self._last[turn.parent], self._last[turn.id])
        self._agents: dict[str, _Agent] = {}
        self._causes: dict[str, str] = {}
        self._sampled: dict[bytes, list[str]] = {}
        """The turns that sampled a phrase, or of which a digest recognises copies."""
        self._sent: dict[bytes, str] = {}
        """The first turn whose request held a phrase."""
        self._first: dict[tuple[str, bytes], str] = {}
        """The first of the first turns of an agent with equal messages."""

    def add(self, turn: Turn) -> str:
        """Add a turn. Returns the turn that caused it; empty if none did."""
        messages = parsed(turn.messages, list[dict[str, Any]]) or []
        answer = parsed(turn.message, dict[str, Any]) or {}
        before = self._agents.get(turn.parent or "")
        kind = self._classes[turn.id] if self._classes[turn.id] in OF_AGENTS else ""
        name = turn.agent or (before.name if before else kind)
        self._agents[turn.id] = _Agent(name, before.opening if before else Opening.of(turn))
        said = _phrases(each for each in messages if each.get("role") not in ("assistant", "tool"))
        cause = self._cause(turn, messages, said) if turn.parent is None else ""
        if cause:
            self._causes[turn.id] = cause
        for phrase in said | _phrases(each for each in messages if each.get("role") == "tool"):
            self._sent.setdefault(phrase, turn.id)
        calls = parsed(turn.message, _Calls) or _Calls()
        # arguments are JSON in a text
        given = bytes(calls.tool_calls).decode(errors="replace").replace("\\n", "\n")
        sampled = _phrases([answer]) - _phrases([{"content": given}])
        for anchor in sampled | _copy_digest(messages, answer):
            self._sampled.setdefault(anchor, []).append(turn.id)
        return cause

    def _cause(self, turn: Turn, messages: list[dict[str, Any]], said: set[bytes]) -> str:
        """The turn that caused a first turn; empty if none did. `said`: the phrases of users and systems."""
        equal = self._first.setdefault((self._agents[turn.id].name, turn.messages), turn.id)
        if equal != turn.id:  # another choice, or a request that was sent again
            return self._causes.get(equal, "")
        texts: dict[str, set[bytes]] = {}
        for phrase in said & self._sampled.keys():
            sender = self._sent.get(phrase, "")
            for writer in self._sampled[phrase]:
                if not sender or self._causes.get(sender) == writer:
                    texts.setdefault(writer, set()).add(phrase)
        texts = {
            writer: phrases
            for writer, phrases in texts.items()
            if sum(map(len, phrases)) >= _ENOUGH_BYTES and self._may_cause(writer, turn)
        }
        copies: dict[str, set[bytes]] = {}
        roles = [message.get("role") for message in messages[:-1]]
        if "assistant" in roles:
            end = len(roles) - 1 - roles[::-1].index("assistant")
            digest = _copy_digest(messages[:end], messages[end])
            writers = [writer for each in digest for writer in self._sampled.get(each, ())]
            copies = {writer: digest for writer in writers if self._may_cause(writer, turn)}
        text, copy = self._latest(texts), self._latest(copies)
        # next to a summary, a copy is one of the messages that were kept, unless it came after that summary
        return copy if not texts or (text and text in self._before(copy)) else text

    def _may_cause(self, writer: str, turn: Turn) -> bool:
        """Whether nothing contradicts that a first turn continues another turn."""
        longer = self._last[turn.id] > self._last[writer]
        return longer and self._agents[turn.id].may_continue(self._agents[writer])

    def _latest(self, held: Mapping[str, set[bytes]]) -> str:
        """The latest of some turns; empty if there is none, or if nothing decides between them.

        Args:
            held: for each turn what a first turn holds of it.
        """
        if len(held) < 2:
            return next(iter(held), "")

        def is_part(turn: str) -> bool:
            return any(held[turn] < other for other in held.values())

        latest = next(turn for turn in sorted(held, reverse=True) if not is_part(turn))
        before = self._before(latest)
        explained = set[bytes]().union(*(held[turn] for turn in before & held.keys() - {latest}))
        decided = all(turn in before or held[turn] <= explained or is_part(turn) for turn in held)
        return latest if decided else ""

    def _before(self, turn: str) -> set[str]:
        """A turn and all that come before it in its chain."""
        before: set[str] = set()
        at: str | None = turn
        while at and at not in before:
            before.add(at)
            at = self._parents.get(at) or self._causes.get(at)
        return before


def _phrases(messages: Iterable[dict[str, Any]]) -> set[bytes]:
    """The phrases in the texts of messages."""
    phrases: set[bytes] = set()
    for message in messages:
        text = text_of(message).encode(errors="replace").translate(_PUNCTUATION)
        lines = text.replace(b". ", b"\n").replace("。".encode(), b"\n").split(b"\n")
        long = (line.strip(b" .,'") for line in lines if len(line) >= _PHRASE_BYTES)
        phrases.update(phrase for phrase in long if len(phrase) >= _PHRASE_BYTES)
    return phrases


def _copy_digest(before: Sequence[dict[str, Any]], answer: dict[str, Any]) -> set[bytes]:
    """The digest that an assistant's message and its copies have; none if the message cannot be read.

    It covers the message before too, unless the assistant's is a long text. Arguments of calls do not count,
    because clients repair them; the ids of the calls do.
    """
    try:
        last = digest_message(before[-1], 0, None, NO_EQUIVALENTS) if before else None
        own = digest_message(answer, 1, last, NO_EQUIVALENTS)
    except InvalidMessages:
        return set()
    return {own.bare or own.content}
