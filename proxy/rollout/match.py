"""Which recorded turn a request continues.

The longest recorded conversation wins. Candidates come by the loose digest, which forgives dropped reasoning
and stripped text; each is then checked message by message. Among equal texts with different ids those in
the spelling of the client come first, then the newest; that there were others is reported.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

import msgspec

from proxy.rollout.conversation import Conversation
from proxy.rollout.known import Known, KnownTurns, read_known
from proxy.rollout.store import Store
from tokenization import CanonicalMessage

Kind = Literal[b"conversation", b"content", b"message", b"rollout"]
_FIRST_LOOKUP = 1
_LOOKUP = 64


@dataclass(frozen=True, slots=True)
class Match:
    """What was found."""

    known: Known | None
    """The turn that is continued."""
    end: int
    """Index of its message in the request; -1 if nothing was found."""
    candidates: int = 1
    """Turns of equal text and different ids among which only recency decided."""
    reason: str = ""
    """Why nothing was found, or not all of the history."""


def index_key(kind: Kind, scope: str, digest: bytes) -> bytes:
    """The key of a turn in a store: 16 bytes.

    Args:
        scope: the session; "" for conversations without one.
    """
    return hashlib.blake2b(scope.encode() + b"\0" + digest, digest_size=16, person=kind).digest()


def rollout_key(rollout: str) -> bytes:
    """The key of all turns of a rollout: what is found are its newest."""
    return index_key(b"rollout", rollout, b"")


def keys_of(
    extended: tuple[bytes, bytes], message: CanonicalMessage, rollout: str, session: str | None
) -> list[bytes]:
    """The keys under which a turn is found again.

    Args:
        extended: loose and content digest of the conversation with the turn's own message.
        message: the turn's own message.
        session: as a client named it; None if none did.
    """
    loose, content = extended
    scope = session or ""
    keys = [
        index_key(b"conversation", scope, loose),
        index_key(b"content", scope, content),
        index_key(b"message", scope, message.loose),
        rollout_key(rollout),
    ]
    if session is None:  # a client may come back with the id it was told
        keys.append(index_key(b"conversation", rollout, loose))
    return keys


class Matcher:
    """Finds the turns that requests continue."""

    def __init__(self, store: Store, known: KnownTurns) -> None:
        self._store = store
        self._known = known

    async def match(self, conversation: Conversation, session: str | None) -> Match:
        """The longest recorded conversation that a request continues.

        Raises:
            StoreError: the store does not answer.
        """
        if not any(made.assistant for made in conversation.messages):
            return Match(None, -1, reason="first_turn")
        scope, ends, tried = session or "", conversation.ends, 0
        size = _FIRST_LOOKUP
        while tried < len(ends):
            some = ends[tried : tried + size]
            keys = {end: index_key(b"conversation", scope, conversation.loose[end]) for end in some}
            found = await self._store.find(list(keys.values()))
            for end in some:
                if turns := found.get(keys[end]):
                    chosen = await self._choose(turns, conversation, end)
                    if chosen is not None:
                        edited = any(other > end for other in ends)
                        known, candidates = chosen
                        return Match(known, end, candidates, "history_edited" if edited else "")
            tried, size = tried + size, _LOOKUP
        return Match(None, -1, reason=await self._explain(conversation, scope))

    async def longest_prefix(self, prompt: bytes, rollout: str) -> Known | None:
        """Of the newest turns of a rollout the one with the most ids that a prompt begins with.

        Raises:
            StoreError: the store does not answer.
        """
        best: Known | None = None
        key = rollout_key(rollout)
        for turn in (await self._store.find([key])).get(key, []):
            known = await self.load(turn)
            if known is None or not known.usable or (best is not None and best.count >= known.count):
                continue
            if prompt[: len(known.raw) - 1] == known.raw[:-1] and prompt[len(known.raw) - 1 :][:1] in b",]":
                best = known
        return best

    async def load(self, turn: str) -> Known | None:
        """A turn with its ids, from memory or from the store; None if it is gone.

        Raises:
            StoreError: the store does not answer.
        """
        known = self._known.get(turn)
        if known is None and (path := await self._store.path(turn)):
            known = read_known(path)
            self._known.put(known)
        return known

    async def _choose(
        self, turns: list[str], conversation: Conversation, end: int
    ) -> tuple[Known, int] | None:
        """The best of the candidates, and how many that recency alone decided between."""
        exact: list[Known] = []
        loose: list[Known] = []
        for turn in turns:
            known = await self.load(turn)
            if known is None or not _continues(conversation, end, known):
                continue
            same = known.lineage.strict == conversation.messages[end].message.strict
            (exact if same else loose).append(known)
        best = exact or loose
        return (best[0], len({known.raw for known in best})) if best else None

    async def _explain(self, conversation: Conversation, scope: str) -> str:
        """Why a history with assistant turns matches nothing."""
        ends = conversation.ends
        if not ends:
            return "ends_with_assistant"
        last = ends[0]
        conversations = [index_key(b"conversation", scope, conversation.loose[end]) for end in ends]
        if await self._store.evicted(conversations[:_LOOKUP]):
            return "evicted"
        content = index_key(b"content", scope, conversation.content[last])
        message = index_key(b"message", scope, conversation.messages[last].message.loose)
        found = await self._store.find([content, message])
        if turns := found.get(content):
            return await self._changed(turns[0], conversation)
        return "history_edited" if found.get(message) else "no_match"

    async def _changed(self, turn: str, conversation: Conversation) -> str:
        """What changed beside the messages since a turn with the same ones."""
        path = await self._store.path(turn)
        if not path:
            return "no_match"
        setting = conversation.setting
        if not _same_json(path[0].tools, setting.tools):
            return "tools_changed"
        if not _same_json(path[0].template_kwargs, setting.template_kwargs):
            return "template_kwargs_changed"
        return "model_changed"


def _continues(conversation: Conversation, end: int, known: Known) -> bool:
    """Whether a turn found by its loose digest is the one that the client sent back."""
    own = conversation.messages[end].message
    if own.reasoning not in (b"", known.lineage.reasonings[-1]):
        return False
    before = conversation.strict[end - 1] if end else conversation.start
    if before == known.lineage.strict_before:
        return True  # spelled as in the request of that turn, and checked then
    sent = conversation.reasonings(0, end + 1)
    recorded = known.lineage.all_reasonings()
    return len(sent) == len(recorded) and all(
        mine in (b"", theirs) for mine, theirs in zip(sent, recorded, strict=True)
    )


def _same_json(left: bytes, right: bytes) -> bool:
    return left == right or _read(left) == _read(right)


def _read(value: bytes) -> object:
    return msgspec.json.decode(value) if value else None
