"""Which recorded turn a request continues.

The longest recorded conversation wins. Candidates come by the exact spelling first, then by the loose digest,
which forgives dropped reasoning and stripped text; each is then checked message by message. Among equal texts
with different ids those come first whose earlier messages the client spelled alike, then the newest; that
there were others is reported.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Literal

import msgspec

from proxy.history.conversation import Conversation
from proxy.history.known import Known, KnownTurns, read_known
from proxy.history.store import FOUND_AT_MOST, Store
from proxy.history.turn import Turn, pack_ids
from tokenization.canonical import extend

Kind = Literal["exact", "conversation", "content", "exchange", "message", "rollout"]
"""What a key is made of: the conversation as it was spelled; whatever clients drop or strip; whatever stands
beside its messages; the turn's own message and the one before it; its own alone; the rollout alone."""
_FIRST_LOOKUP = 1
_LOOKUP = 64
_DISTINCT = 120
"""Bytes of a message that nobody else will have sampled by chance."""
_EXPLAINING = 4
"""Recorded turns that are looked at to say what changed."""
_SETTINGS = ("tools_changed", "template_kwargs_changed", "model_changed")


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
    return hashlib.blake2b(scope.encode() + b"\0" + digest, digest_size=16, person=kind.encode()).digest()


def rollout_key(rollout: str) -> bytes:
    """The key of all turns of a rollout: what is found are its newest."""
    return index_key("rollout", rollout, b"")


def keys_of(digests: Mapping[Kind, bytes], rollout: str, session: str | None) -> list[bytes]:
    """The keys under which a turn is found again.

    Args:
        session: as a client named it; None if none did: its clients may name none, or what they were told.
    """
    scopes = [session] if session is not None else ["", rollout]
    keys = [index_key(kind, scope, digest) for scope in scopes for kind, digest in digests.items()]
    return [*keys, rollout_key(rollout)]


def exchange(conversation: Conversation, last: int, own: bytes | None = None) -> bytes:
    """Digest of an assistant's message and the one before it.

    Args:
        last: the index of the message.
        own: its loose digest, if it is not one of the conversation's.
    """
    before = conversation.messages[last - 1].message.loose if last else b""
    return extend(before, own if own is not None else conversation.messages[last].message.loose)


class Matcher:
    """Finds the turns that requests continue."""

    def __init__(self, store: Store, known: KnownTurns, executor: Executor | None = None) -> None:
        self._store = store
        self._known = known
        self._executor = executor

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
            exact = {end: index_key("exact", scope, conversation.strict[end]) for end in some}
            loose = {end: index_key("conversation", scope, conversation.loose[end]) for end in some}
            found = await self._store.find([*exact.values(), *loose.values()])
            for end in some:
                chosen = await self._choose(found.get(exact[end], []), conversation, end)
                if chosen is None:
                    chosen = await self._choose(found.get(loose[end], []), conversation, end)
                if chosen is not None:
                    edited = any(other > end for other in ends)
                    return Match(chosen[0], end, chosen[1], "history_edited" if edited else "")
            tried, size = tried + size, _LOOKUP
        return Match(None, -1, reason=await self._explain(conversation, scope))

    async def longest_prefix(self, prompt: bytes, rollout: str) -> Known | None:
        """Of the turns of a rollout the one with the most ids that a prompt begins with.

        The newest are looked at first; if none of them is it, all are.

        Raises:
            StoreError: the store does not answer.
        """
        key = rollout_key(rollout)
        newest = (await self._store.find([key])).get(key, [])
        best = await self._longest(newest, prompt)
        if best is None and len(newest) == FOUND_AT_MOST:
            turns = await self._store.turns(rollout)
            packed = pack_ids(msgspec.json.decode(prompt, type=list[int]))
            best = await self._longest([turn.id for turn in turns if _stands_in(packed, turn)], prompt)
        return best

    async def _longest(self, turns: list[str], prompt: bytes) -> Known | None:
        best: Known | None = None
        for turn in turns:
            known = await self.load(turn)
            longer = known is not None and (best is None or known.count > best.count)
            if known is not None and longer and known.begins(prompt):
                best = known
        return best

    async def load(self, turn: str) -> Known | None:
        """A turn with its ids, from memory or from the store; None if it is gone.

        Raises:
            StoreError: the store does not answer.
        """
        known = self._known.get(turn)
        if known is None and (path := await self._store.path(turn)):
            joining = asyncio.get_running_loop().run_in_executor
            known = await joining(self._executor, read_known, path, self._known.get)
            self._known.put(known)
        return known

    async def _choose(
        self, turns: list[str], conversation: Conversation, end: int
    ) -> tuple[Known, int] | None:
        """The best of the candidates, and how many that recency alone decided between."""
        alike: list[Known] = []
        others: list[Known] = []
        for turn in turns:
            known = await self.load(turn)
            if known is None or not _continues(conversation, end, known):
                continue
            same = known.lineage.strict_before == _before(conversation, end)
            (alike if same else others).append(known)
        best = alike or others
        best = [known for known in best if known.usable] or best
        return (best[0], len({known.raw for known in best})) if best else None

    async def _explain(self, conversation: Conversation, scope: str) -> str:
        """Why a history with assistant turns matches nothing."""
        ends = conversation.ends
        if not ends:
            return "ends_with_assistant"
        last = ends[0]
        conversations = [index_key("conversation", scope, conversation.loose[end]) for end in ends]
        if await self._store.evicted(conversations[:_LOOKUP]):
            return "evicted"
        content = index_key("content", scope, conversation.content[last])
        known = [index_key("exchange", scope, exchange(conversation, last))]
        if scope or len(conversation.raws[last]) >= _DISTINCT:
            known.append(index_key("message", scope, conversation.messages[last].message.loose))
        found = await self._store.find([content, *known])
        if turns := found.get(content):
            return await self._changed(turns[:_EXPLAINING], conversation)
        return "history_edited" if found else "no_match"

    async def _changed(self, turns: list[str], conversation: Conversation) -> str:
        """What changed since turns with the same messages, as far as clients may respell those."""
        settings = [path[-1].settings for turn in turns if (path := await self._store.path(turn))]
        if not settings:
            return "no_match"
        now = conversation.begin[1:]
        if now in settings:
            return "history_edited"  # in what the digest forgives: the reasoning differs
        differing = zip(_SETTINGS, settings[0], now, strict=True)
        return next(reason for reason, before, after in differing if before != after)


def _before(conversation: Conversation, end: int) -> bytes:
    """Digest of the messages before one, as this client spells them."""
    return conversation.strict[end - 1] if end else conversation.begin.whole


def _continues(conversation: Conversation, end: int, known: Known) -> bool:
    """Whether a turn found by a digest is the one that the client sent back."""
    own = conversation.messages[end].message
    if own.reasoning not in (b"", known.lineage.reasonings[-1]):
        return False
    if known.lineage.strict_before == _before(conversation, end):
        return True  # spelled as in the request of that turn, and checked then
    sent = conversation.reasonings(0, end + 1)
    recorded = known.lineage.all_reasonings()
    return len(sent) == len(recorded) and all(
        mine in (b"", theirs) for mine, theirs in zip(sent, recorded, strict=True)
    )


def _stands_in(packed: bytes, turn: Turn) -> bool:
    """Whether what a turn sampled stands at its place in a prompt of packed ids."""
    start = 4 * turn.prompt_tokens
    return packed[start : start + len(turn.completion)] == turn.completion != b""
