"""Finds the recorded turn that a request continues.

The longest recorded conversation wins. Turns are searched first by the exact spelling of the conversation,
then by a digest that ignores dropped reasoning and stripped text, then by one that ignores the arguments of
tool calls that were cut off; each candidate is then checked. Turns with equal ids are one candidate. If
several candidates with different ids remain, the one is used that the client names by a token (`echo.py`);
if it names none, the prompt is rendered.
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple
from weakref import WeakValueDictionary

import msgspec

from proxy.history.cache import TurnCache
from proxy.history.cached_turn import CachedTurn, read_turn
from proxy.history.candidates import all_listed, continues, count_turns, in_one_rollout, lists_all, of_rollout
from proxy.history.claims import Claims
from proxy.history.conversation import Conversation
from proxy.history.prompt_image import PromptImage
from proxy.history.scope import Scope, changed_part
from proxy.history.store import FOUND_AT_MOST, CandidateGroup, Found, Store
from proxy.history.text_index import KINDS, content_key, text_keys
from proxy.history.turn import Turn, pack_ids
from proxy.history.vocabulary import Reason
from tokenization.canonical import extend

_LOOKUP = 64
"""Number of ends of turns in one lookup."""
_EXPLAINED = 4
"""Number of recorded turns that are read to explain a miss."""


@dataclass(frozen=True, slots=True)
class Match:
    """The recorded turn that a request continues, or the reason why there is none."""

    turn: CachedTurn | None = None
    end: int = -1
    """Index of its message in the request; -1 if nothing was found."""
    reason: Reason | None = None
    """The reason if no turn was found, or not for all of the history."""
    candidates: int = 0
    """Number of recorded turns with this text, with any ids."""
    same_rollout: bool = True
    """Whether the request belongs to the rollout of `turn`. If not, only the ids are reused."""
    claimed: bool = False
    """Whether `turn` was claimed for this request among several."""
    shared: tuple[bytes, bytes] | None = None
    """Set if other rollouts may hold turns with the ids of `turn`: the key that finds them, and the
    `ids_digest`."""


class AmbiguousImages(Exception):
    """Turns with equal ids hold different images, and nothing decides between them."""


class _Search(NamedTuple):
    """What is searched for a request."""

    conversation: Conversation
    scope: Scope
    rollout: str | None
    """Only turns of this rollout; None for all in the scope."""
    echoed: Mapping[int, str]
    """The turns that the client names, by the indexes of their messages."""

    @property
    def place(self) -> str | None:
        """The only rollout that can hold the turn; None if any can."""
        return self.rollout or self.scope.rollout


class _Fit(NamedTuple):
    """Turns with equal ids that a request may continue."""

    key: bytes
    """What they were found by."""
    group: CandidateGroup
    turn: CachedTurn
    """One of them."""
    repaired: bool
    """Whether the client completed the JSON of one of its tool calls."""


class Matcher:
    """Finds the turns that requests continue."""

    def __init__(self, store: Store, cache: TurnCache, executor: Executor | None = None) -> None:
        self.store = store
        self._cache = cache
        self._executor = executor
        self._claiming: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def match(
        self,
        conversation: Conversation,
        scope: Scope,
        rollout: str | None = None,
        echoed: Mapping[int, str] | None = None,
    ) -> Match:
        """The longest recorded conversation that a request continues.

        At most one key in 64 assistant messages is looked up in histories longer than that, and then those
        around the longest one found: an edit far back costs a few lookups, not one for each message.

        Args:
            rollout: only turns of this rollout; None for all in the scope.
            echoed: the turns that the client names, by the indexes of their messages: they decide between
                turns with equal text.

        Raises:
            StoreError: the store does not respond.
        """
        search = _Search(conversation, scope, rollout, echoed or {})
        if not conversation.holds_assistant:
            return Match(reason=Reason.FIRST_TURN)
        ends, looked_up = conversation.ends, 0
        for batch in _batches(len(ends)):
            found = await self._look_up([ends[i] for i in batch], search)
            if found is not None:
                match, end = found
                position = ends.index(end)
                miss = max((i for i in batch if i < position), default=looked_up - 1)
                between = ends[miss + 1 : position]
                return await self._between(between, search) or match
            looked_up += len(batch)
        return Match(reason=await self._explain(search))

    async def load(self, turn_id: str) -> CachedTurn | None:
        """A turn with its ids, from the cache or the store; None if it is gone.

        Raises:
            StoreError: the store does not respond.
        """
        turn = self._cache.turn(turn_id)
        if turn is None and (path := await self.store.path(turn_id)):
            run = asyncio.get_running_loop().run_in_executor
            turn = await run(self._executor, read_turn, path, self._cache.turn)
            self._cache.put(turn, path[-1].parent)
        return turn

    async def longest_prefix(
        self, prompt: bytes, rollout: str, images: Sequence[PromptImage] | None = None
    ) -> CachedTurn | None:
        """The turn of a rollout with the most ids that a prompt begins with.

        The newest turns are tried first; if none of them matches, all are.

        Args:
            images: those of the prompt; turns with other images do not count. None counts all turns.

        Raises:
            AmbiguousImages: `images` is None, and turns with these ids hold different images.
            StoreError: the store does not respond.
        """
        newest = await self.store.newest(rollout, FOUND_AT_MOST)
        best = await self._longest(newest, prompt, images)
        if not best and len(newest) == FOUND_AT_MOST:
            turns = await self.store.turns(rollout)
            packed = pack_prompt(prompt)
            best = await self._longest(
                [turn.id for turn in turns if _may_begin(turn, packed)], prompt, images
            )
        if images is None and not all(same_images(turn.images, best[0].images) for turn in best):
            raise AmbiguousImages
        return best[0] if best else None

    async def longest_of(self, turn_ids: Sequence[str], prompt: bytes) -> CachedTurn | None:
        """The one of some turns with the most ids that a prompt begins with. Raises StoreError."""
        best = await self._longest(turn_ids, prompt)
        return best[0] if best else None

    async def _longest(
        self, turn_ids: Sequence[str], prompt: bytes, images: Sequence[PromptImage] | None = None
    ) -> list[CachedTurn]:
        """Those of some turns with the most ids that a prompt begins with: all have equal ids."""
        best: list[CachedTurn] = []
        for turn_id in turn_ids:
            turn = await self.load(turn_id)
            if turn is None or (best and turn.count < best[0].count) or not turn.begins(prompt):
                continue
            if images is None or same_images(turn.images, images[: len(turn.images)]):
                best = [*best, turn] if best and turn.count == best[0].count else [turn]
        return best

    async def claim(self, match: Match, claims: Claims) -> Match:
        """Choose one of the turns with equal ids that several rollouts hold: one that no request continues.

        If all are continued, only the ids are reused (`same_rollout` is false).

        Raises:
            StoreError: the store does not respond.
        """
        if match.shared is None:
            return match
        key, ids = match.shared
        # one request at a time: others of this process would race for the same candidates
        async with self._claiming.setdefault(ids, asyncio.Lock()):
            while True:
                found = (await self.store.find([key])).get(key)
                group = next((group for group in found.groups if group.ids == ids), None) if found else None
                if group is not None and in_one_rollout(group):
                    return replace(match, candidates=match.candidates or group.total)
                candidates = [each for each in group.candidates if each.open] if group else []
                for candidate in candidates:
                    if await claims.take(candidate.turn) and (turn := await self.load(candidate.turn)):
                        return replace(match, turn=turn, claimed=True)
                # other processes may have claimed all that were found: then there may be more
                if not candidates:
                    return replace(match, same_rollout=False)

    async def _between(self, ends: Sequence[int], search: _Search) -> Match | None:
        """The longest match among the ends between one that matched and one that did not."""
        best: Match | None = None
        while ends:
            step = -(-len(ends) // _LOOKUP)
            found = await self._look_up(ends[step - 1 :: step], search)
            if found is None:
                ends = ends[len(ends) - len(ends) % step :] if step > 1 else []
                continue
            best, end = found
            position = list(ends).index(end)
            ends = ends[max(0, position - step + 1) : position]
        return best

    async def _look_up(self, ends: Sequence[int], search: _Search) -> tuple[Match, int] | None:
        """The match at the first of these ends that has one."""
        keys = {end: text_keys(search.scope, search.conversation, end) for end in ends}
        found = await self.store.find([key for of_end in keys.values() for key in of_end], search.place)
        for end in ends if found else ():
            hits = [(key, found.get(key)) for key in keys[end]]
            match = await self._choose(hits, search, end)
            if match is not None:
                return match, end
        return None

    async def _choose(
        self, found: Sequence[tuple[bytes, Found | None]], search: _Search, end: int
    ) -> Match | None:
        """The turn that ends at one message, from the results of each kind of key."""
        conversation, rollout = search.conversation, search.rollout
        if rollout is not None and not all(all_listed(hits) and lists_all(hits) for _, hits in found):
            return await self._choose_in_rollout(search, end, rollout)
        groups = [[of_rollout(group, rollout) for group in hits.groups] if hits else [] for _, hits in found]
        candidates = count_turns(found[1:], groups[1:], rollout) or count_turns(
            found[:1], groups[:1], rollout
        )
        for kind, (key, hits), of_kind in zip(KINDS, found, groups, strict=False):
            fitting: list[_Fit] = []
            for group in of_kind:
                turn = await self.load(group.candidates[0].turn) if group.candidates else None
                repaired = continues(conversation, end, turn, kind) if turn else None
                if turn is not None and repaired is not None:
                    fitting.append(_Fit(key, group, turn, repaired))
            if not fitting:
                continue
            before = conversation.strict_before(end)
            best = [fit for fit in fitting if fit.turn.spelling_before == before] or fitting
            named = await self._named(fitting, search, end) if end in search.echoed else None
            if named is None and (len(best) > 1 or not all_listed(hits)):
                return Match(None, end, Reason.AMBIGUOUS, candidates)
            repaired = (named or best[0]).repaired
            edited = end != conversation.ends[0]
            reason = Reason.HISTORY_EDITED if edited else Reason.CALL_REPAIRED if repaired else None
            if named is not None or in_one_rollout(best[0].group):
                return Match((named or best[0]).turn, end, reason, candidates)
            shared = (best[0].key, best[0].group.ids)
            return Match(best[0].turn, end, reason, candidates, shared=shared)
        return None

    async def _named(self, fitting: Sequence["_Fit"], search: _Search, end: int) -> "_Fit | None":
        """The turn that the client names, if its text is that of the request."""
        name = search.echoed[end]
        for fit in fitting:
            if any(candidate.turn == name for candidate in fit.group.candidates):
                turn = await self.load(name)
                return fit._replace(turn=turn) if turn is not None else None
        # of many turns under one key, only some are listed
        path = await self.store.path(name)
        if not path or not await self._has_text(path[-1], search, end):
            return None
        turn = await self.load(name)
        return None if turn is None else fitting[0]._replace(turn=turn, repaired=False)

    async def _has_text(self, turn: Turn, search: _Search, end: int) -> bool:
        """Whether a turn belongs to the scope of a request and ends with its message at `end`."""
        if turn.scope != search.scope.parts or not turn.spelling:
            return False
        if extend(turn.spelling_before, turn.spelling) != search.conversation.messages[end].strict:
            return False
        if search.rollout is not None:
            return turn.rollout == search.rollout
        session = await self.store.session(turn.rollout)
        if session is None or session.tenant != search.scope.tenant:
            return False
        return search.scope.session == (session.name if session.explicit else None)

    async def _choose_in_rollout(self, search: _Search, end: int, rollout: str) -> Match | None:
        """The turn of a rollout that ends at one message, where `find` lists only some of the turns there."""
        conversation = search.conversation
        strict = conversation.messages[end].strict
        turns = [
            turn
            for turn in await self.store.turns(rollout)
            if turn.spelling and extend(turn.spelling_before, turn.spelling) == strict
        ]
        turns = [turn for turn in turns if turn.id == search.echoed.get(end)] or turns
        if len({turn.ids_digest for turn in turns}) != 1:
            return Match(None, end, Reason.AMBIGUOUS, len(turns)) if turns else None
        turn = await self.load(turns[-1].id)
        reason = None if end == conversation.ends[0] else Reason.HISTORY_EDITED
        return Match(turn, end, reason, len(turns)) if turn else None

    async def _explain(self, search: _Search) -> Reason:
        """Why a history with assistant messages matches nothing."""
        conversation, scope, rollout = search.conversation, search.scope, search.rollout
        ends = conversation.ends
        if not ends:
            return Reason.ENDS_WITH_ASSISTANT
        last = ends[0]
        # after an eviction, the store no longer tells that the proxy chose the rollout's name
        scopes = [scope, replace(scope, session=None)]
        keys = [key for each in scopes for e in ends[:_LOOKUP] for key in text_keys(each, conversation, e)]
        if await self.store.evicted(keys):
            return Reason.EVICTED
        own = conversation.messages[last]
        key = content_key(scope, conversation, last, own.message, own.distinctive)
        hits = (await self.store.find([key], search.place)).get(key)
        candidates = [each for group in hits.groups for each in group.candidates] if hits else []
        candidates = [each for each in candidates if rollout in (None, each.rollout)][:_EXPLAINED]
        paths = [path for each in candidates if (path := await self.store.path(each.turn))]
        if not paths:
            return Reason.NO_MATCH
        same_text = [
            path[-1] for path in paths if path[-1].spelling_before == conversation.strict_before(last)
        ]
        if not same_text:
            return Reason.HISTORY_EDITED
        # the scopes are equal: the difference is in the reasoning, which the keys ignore
        return changed_part(same_text[0].scope, scope.parts) or Reason.HISTORY_EDITED


def same_images(some: Sequence[PromptImage], others: Sequence[PromptImage]) -> bool:
    """Whether images are equal and at the same places in the ids of their prompts."""
    places = [[(image.offset, image.length, image.digest) for image in images] for images in (some, others)]
    return places[0] == places[1]


def _batches(count: int) -> list[list[int]]:
    """Positions in the list of ends to look up, batch by batch: the last, some before it, then a sample."""
    near = min(count, 1 + _LOOKUP)
    batches = [list(range(min(count, 1))), list(range(1, near))]
    if count > near:
        step = -(-(count - near) // _LOOKUP)
        # counted from the far end, so that the first turn of the conversation is among them
        batches.append(sorted(range(count - 1, near - 1, -step)))
    return [batch for batch in batches if batch]


def pack_prompt(prompt: bytes) -> bytes:
    """The ids of a prompt, a checked JSON array, up to the first that no turn can hold."""
    try:
        return pack_ids(msgspec.json.decode(prompt, type=list[int]))
    except (OverflowError, msgspec.MsgspecError):
        # more than 32 bits: the engine refuses such an id with its own message
        fitting = takewhile(lambda digits: len(digits) < 10, prompt.strip(b"[]").split(b","))
        return pack_ids([int(digits) for digits in fitting])


def _may_begin(turn: Turn, packed: bytes) -> bool:
    """Whether the completion of a turn is at its position in a prompt of packed ids."""
    start = 4 * turn.prompt_tokens
    return packed[start : start + len(turn.completion)] == turn.completion != b""
