"""Finds the recorded turn that a request continues.

The longest recorded conversation wins. Turns are searched first by the exact spelling of the conversation,
then by digests that ignore what clients drop or change (`chat_tokenizer.equivalences`); each candidate is
then checked. Turns with equal ids are one candidate. If several candidates with different ids remain, the one
is used that the client names by a token (`echo.py`); if it names none, the prompt is rendered. A prompt of
ids continues the turn with the most ids that it begins with, whatever its text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from chat_tokenizer import InvalidIds, ids
from chat_tokenizer.canonical import dropped, extend
from tokenproxy.base.request import ChatRequest, EchoPolicy
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.cache import CachedTurn, TurnCache, read_turn
from tokenproxy.record.claims import Claims
from tokenproxy.record.encoders import EncoderPool
from tokenproxy.record.identity import (
    BARE,
    CONTENT,
    EXACT,
    KINDS,
    LENIENT,
    Conversation,
    Scope,
    changed_part,
    prefix_keys,
    text_keys,
    whole_key,
)
from tokenproxy.record.images import same_images
from tokenproxy.record.lenient import is_continued, reason_of
from tokenproxy.record.store import ALL, Store, StoreError, session_id
from tokenproxy.record.turn import FOUND_AT_MOST, NOTHING, CandidateGroup, Found, PromptImage, Turn
from tokenproxy.record.vocabulary import Reason

_LOOKUPS = (1, 64, 1024)
"""Numbers of ends of turns in the first look-ups; further ones are as large as the last. Most requests
continue the last turn of their history."""
_PREFIX_LOOKUP = 192
"""Number of keys in one lookup of a prompt of ids."""
_NEW_TURNS = 8
"""Number of turns that are read first: another process rarely recorded more of a conversation meanwhile."""
_EXPLAINED = 4
"""Number of recorded turns that are read to explain a miss."""


class Match(msgspec.Struct, frozen=True):
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
    message: bytes = b""
    """The recorded message as JSON, where the client sent it back in a form that has a reason."""
    shared: tuple[bytes, bytes] | None = None
    """Set if other rollouts may hold turns with the ids of `turn`: the key that finds them, and the
    `ids_digest`."""


class _Search(NamedTuple):
    """What is searched for a request."""

    conversation: Conversation
    scope: Scope
    rollout: str | None
    """Only turns of this rollout; None for all in the scope."""
    echoed: Mapping[int, str]
    """The turns that the client names, by the indexes of their messages: they decide between turns with
    equal text."""
    lenient: bool
    """Whether forms with a reason are searched too."""


class _Fit(NamedTuple):
    """Turns with equal ids that a request may continue."""

    group: CandidateGroup
    turn: CachedTurn
    """One of them."""
    reason: str
    """The word for the form in which the client sent it back; empty if it has none."""


@dataclass(frozen=True, slots=True)
class Matcher:
    """Finds the turns that requests continue. One per application."""

    store: Store
    cache: TurnCache
    encoders: EncoderPool
    metrics: Metrics
    echo_policy: EchoPolicy = EchoPolicy.LENIENT
    """For requests that set none."""

    async def match(
        self,
        request: ChatRequest,
        conversation: Conversation,
        scope: Scope,
        claims: Claims,
        may_continue: Callable[[CachedTurn], bool] = lambda turn: True,
    ) -> Match:
        """The longest recorded conversation that a request continues; pins its rollout."""
        match = Match(reason=Reason.FIRST_TURN)
        if conversation.ends or conversation.ends_with_assistant:
            lenient = (request.echo_policy or self.echo_policy) is EchoPolicy.LENIENT
            search = _Search(conversation, scope, _only_rollout(request), request.echoed, lenient)
            try:
                match = await self._search(search)
                if match.turn is not None and not may_continue(match.turn):
                    match = Match()
                match = await self.claim(match, claims)
            except StoreError as error:
                error.report(self.metrics, "the prompt of a request is rendered")
                match = Match(reason=Reason.STORE_UNAVAILABLE)
        rollout = rollout_of(request)
        if rollout is None and match.turn is not None and match.same_rollout:
            rollout = match.turn.rollout
        if rollout is not None:
            await claims.pin(rollout)
        return match

    async def match_ids(self, request: ChatRequest, prompt: bytes, scope: Scope, claims: Claims) -> Match:
        """The recorded turn with the most ids that a prompt, a compact JSON array of ids, begins with.

        In a session, turns that the index does not hold (of the chat routes) are found among the newest;
        ids alone do not continue a prompt with images.

        Raises:
            StoreError: the store does not respond.
        """
        rollout = rollout_of(request)
        match = await self._longest_indexed(prompt, scope, _only_rollout(request))
        if rollout is not None:
            newest = await self._longest(await self.store.newest(rollout, FOUND_AT_MOST), prompt)
            if newest and (match.turn is None or newest[0].count > match.turn.count) and not newest[0].images:
                return Match(newest[0])
        return await self.claim(match, claims)

    async def longest_in_session(
        self, request: ChatRequest, prompt: bytes, images: Sequence[PromptImage] | None = None
    ) -> list[CachedTurn]:
        """The turns of a request's session with the most ids that a prompt begins with: all have equal ids.

        The newest are tried first; if none fits, all are. There are none without a session, or if the store
        does not respond.

        Args:
            images: those of the prompt; turns with other images do not count. None counts all turns.
        """
        rollout = rollout_of(request)
        if rollout is None:
            return []
        try:
            newest = await self.store.newest(rollout, FOUND_AT_MOST)
            best = await self._longest(newest, prompt, images)
            if best or len(newest) < FOUND_AT_MOST:
                return best
            packed = _pack_prompt(prompt)
            turns = [turn.id for turn in await self.store.turns(rollout) if _may_begin(turn, packed)]
            return await self._longest(turns, prompt, images)
        except StoreError as error:
            error.report(self.metrics, "a turn is recorded without the one before it")
            return []

    async def claim(self, match: Match, claims: Claims) -> Match:
        """Choose one of the turns with equal ids that several rollouts hold: one that no request continues.

        If all are continued, only the ids are reused (`same_rollout` is false).
        """
        if match.shared is None:
            return match
        key, digest = match.shared
        groups = (await self.store.find([key])).get(key, NOTHING).groups
        group = next((group for group in groups if group.ids == digest), None)
        if group is not None and group.in_one_rollout:
            return replace(match, candidates=match.candidates or group.total, shared=None)
        while (turn_id := await claims.take(key, digest)) is not None:
            if (turn := await self.load(turn_id)) is not None:
                return replace(match, turn=turn, claimed=True)
        return replace(match, same_rollout=False)

    async def load(self, turn_id: str) -> CachedTurn | None:
        """A turn with its ids, from the cache or the store; None if it is gone."""
        missing: str | None = turn_id
        new, part = list[Turn](), list[Turn]()
        while missing is not None and (cached := self.cache.turn(missing)) is None:
            part = part or await self.store.path(missing, ALL if new else _NEW_TURNS)
            if not part:
                return None
            new.append(part.pop())
            missing = new[-1].parent
        if not new:
            return cached
        turn = await self.encoders.run(lambda: read_turn(new[::-1], cached))
        self.cache.put(turn, new[0].parent)
        return turn

    async def _search(self, search: _Search) -> Match:
        """The longest recorded conversation that was asked for, or the reason why there is none."""
        conversation = search.conversation
        ends, sizes = list(conversation.ends), list(_LOOKUPS)
        all_found: dict[bytes, Found] = {}
        while ends:
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            keys = {end: text_keys(search.scope, conversation.messages[end]) for end in ends[:size]}
            found = await self.store.find([key for of_end in keys.values() for key in of_end])
            all_found |= found
            for end in keys if found else ():
                match = await self._choose(keys[end], found, search, end)
                if match is not None:
                    return match
            if search.lenient and ends[0] == conversation.ends[0]:
                echo = await self._echo(search, ends[0], all_found)
                if echo is not None:
                    return echo
            del ends[:size]
        return Match(reason=await self._explain(search, all_found))

    async def _longest_indexed(self, prompt: bytes, scope: Scope, rollout: str | None) -> Match:
        """The turn with the most ids that a prompt begins with, of those that the index holds."""
        keys = prefix_keys(scope, _pack_prompt(prompt))
        for start in range(0, len(keys), _PREFIX_LOOKUP):
            part = keys[start : start + _PREFIX_LOOKUP]
            found = await self.store.find(part)
            for key in part:
                turns = [each.turn for each in found.get(key, NOTHING).turns(rollout)]
                if longest := await self._longest(turns, prompt):
                    digest: bytes = longest[0].hasher.digest()
                    return Match(longest[0], shared=None if rollout else (whole_key(scope, digest), digest))
        return Match()

    async def _longest(
        self, turn_ids: Sequence[str], prompt: bytes, images: Sequence[PromptImage] | None = None
    ) -> list[CachedTurn]:
        """Those of some turns with the most ids that a prompt begins with; see `longest_in_session`."""
        best: list[CachedTurn] = []
        for turn_id in turn_ids:
            turn = await self.load(turn_id)
            if turn is None or (best and turn.count < best[0].count) or not turn.begins(prompt):
                continue
            if images is None or same_images(turn.images, images[: len(turn.images)]):
                best = [*best, turn] if best and turn.count == best[0].count else [turn]
        return best

    async def _choose(
        self, keys: Sequence[bytes], found: Mapping[bytes, Found], search: _Search, end: int
    ) -> Match | None:
        """The turn that ends at one message, from what was found under each kind of key."""
        conversation = search.conversation
        hits = [found.get(key, NOTHING) for key in keys]
        if search.rollout is not None:
            listed = [sum([len(group.candidates) for group in each.groups]) for each in hits]
            if any(each.total > count for each, count in zip(hits, listed, strict=True)):
                return await self._choose_in_rollout(search, end, search.rollout)
            hits = [each.of_rollout(search.rollout) for each in hits]
        candidates = sum(each.total for each in hits[1:])
        for kind, key, of_kind in zip(KINDS, keys, hits, strict=False):
            fitting: list[_Fit] = []
            unknown = False
            for group in of_kind.groups:
                turn = None
                for candidate in group.candidates:
                    turn = turn or (await self.load(candidate.turn) if candidate.turn else None)
                # evicted, or lost with its server: it may be the one that is meant
                unknown = unknown or (turn is None and group.candidates != [])
                echo = _continues(conversation, end, turn, kind) if turn else None
                if turn is not None and echo is not None:
                    fitting.append(_Fit(group, turn, echo))
            if not fitting and unknown:
                return Match(None, end, Reason.EVICTED, candidates)
            if not fitting:
                continue
            before = conversation.strict_before(end)
            best = [fit for fit in fitting if fit.turn.spelling_before == before] or fitting
            named = await self._named(fitting, search, end) if end in search.echoed else None
            if named is None and (len(best) > 1 or unknown or not of_kind.all_listed):
                return Match(None, end, Reason.AMBIGUOUS, candidates)
            fit = named or best[0]
            edited = end != conversation.ends[0]
            reason = Reason.HISTORY_EDITED if edited else Reason(fit.reason) if fit.reason else None
            shared = None if named is not None or fit.group.in_one_rollout else (key, fit.group.ids)
            return Match(fit.turn, end, reason, candidates, shared=shared)
        return None

    async def _echo(self, search: _Search, end: int, all_found: dict[bytes, Found]) -> Match | None:
        """The turn that a client sent back in a form that has a reason, or why none is used.

        None if no turn was sent back in such a form. Adds what was found to `all_found`.
        """
        message = search.conversation.messages[end]
        if message.lenient == message.loose:
            return None
        key = search.scope.key(LENIENT, message.lenient)
        all_found |= (hits := await self.store.find([key]))
        found = hits.get(key, NOTHING)
        candidates = found.turns(search.rollout)
        candidates = [each for each in candidates if each.turn == search.echoed.get(end)] or candidates
        fits: list[tuple[Turn, str]] = []
        for each in candidates[:FOUND_AT_MOST]:
            path = await self.store.path(each.turn, 1)
            reason = await reason_of(self.store, self.encoders, search.conversation, end, path)
            if reason:
                fits.append((path[-1], reason))
        evicted = any(not each.turn for group in found.groups for each in group.candidates)
        if len(fits) > 1 or (fits and (evicted or len(candidates) > FOUND_AT_MOST or not found.all_listed)):
            return Match(None, end, Reason.AMBIGUOUS, found.total)
        if not fits or await is_continued(self.store, fits[0][0]):
            return None
        turn, reason = fits[0]
        cached = await self.load(turn.id)
        return Match(cached, end, Reason(reason), message=turn.message) if cached else None

    async def _named(self, fitting: Sequence["_Fit"], search: _Search, end: int) -> "_Fit | None":
        """The turn that the client names, if its text is that of the request."""
        turn = await self.load(search.echoed[end])
        if turn is None:
            return None
        for fit in fitting:
            if any(candidate.turn == turn.id for candidate in fit.group.candidates):
                return fit._replace(turn=turn)
        # of many turns under one key, only some are listed
        if turn.scope != search.scope.parts or not _ends_at(turn, search.conversation, end):
            return None
        if search.rollout not in (None, turn.rollout):
            return None
        session = await self.store.session(turn.rollout)
        if session is None or session.tenant != search.scope.tenant:
            return None
        if search.rollout is None and search.scope.session != (session.name if session.explicit else None):
            return None
        return fitting[0]._replace(turn=turn, reason="")

    async def _choose_in_rollout(self, search: _Search, end: int, rollout: str) -> Match | None:
        """The turn of a rollout that ends at one message, where `find` lists only some of the turns there."""
        conversation = search.conversation
        turns = [turn for turn in await self.store.turns(rollout) if _ends_at(turn, conversation, end)]
        turns = [turn for turn in turns if turn.id == search.echoed.get(end)] or turns
        if len({turn.ids_digest for turn in turns}) != 1:
            return Match(None, end, Reason.AMBIGUOUS, len(turns)) if turns else None
        turn = await self.load(turns[-1].id)
        reason = None if end == conversation.ends[0] else Reason.HISTORY_EDITED
        return Match(turn, end, reason, len(turns)) if turn else None

    async def _explain(self, search: _Search, found: Mapping[bytes, Found]) -> Reason:
        """Why a history with assistant messages matches nothing; `found`: under the keys of its messages."""
        conversation, scope, rollout = search.conversation, search.scope, search.rollout
        ends = conversation.ends
        if not ends:
            return Reason.ENDS_WITH_ASSISTANT
        last = ends[0]
        content = scope.key(CONTENT, conversation.messages[last].content)
        keys = [content]
        if scope.session is not None:
            # after an eviction, the store no longer tells that the proxy chose the rollout's name
            unnamed = replace(scope, session=None)
            messages = [conversation.messages[end] for end in ends[: _LOOKUPS[1]]]
            keys += [key for message in messages for key in text_keys(unnamed, message)]
        more = await self.store.find(keys)
        candidates = more.pop(content, NOTHING).turns(rollout)[:_EXPLAINED]
        groups = [group for hits in (*found.values(), *more.values()) for group in hits.groups]
        if any(not each.turn for group in groups for each in group.candidates):
            return Reason.EVICTED
        paths = [path for each in candidates if (path := await self.store.path(each.turn, 1))]
        if not paths:
            edited = any(hits.turns(rollout) for hits in found.values())
            return Reason.HISTORY_EDITED if edited else Reason.NO_MATCH
        before = conversation.strict_before(last)
        same_text = [path[-1] for path in paths if path[-1].spelling_before == before]
        # if the scopes are equal, the difference is in the reasoning, which the keys ignore
        changed = changed_part(same_text[0].scope, scope.parts) if same_text else None
        return changed or Reason.HISTORY_EDITED


def rollout_of(request: ChatRequest) -> str | None:
    """The rollout of the session that a request names; None if it names none."""
    return session_id(request.tenant, request.session.name) if request.session is not None else None


def _only_rollout(request: ChatRequest) -> str | None:
    """The only rollout whose turns a request continues; None for all in its scope.

    A session that the client named is part of the scope; a name that the proxy chose is not, and limits the
    search instead.
    """
    return None if request.session is None or request.session.explicit else rollout_of(request)


def _continues(conversation: Conversation, end: int, turn: CachedTurn, kind: str) -> str | None:
    """Check whether a turn found by a digest is the one that the client sent back.

    Returns:
        None if it is another; else the reason of the form that it has now, empty if that has none.
    """
    if kind == EXACT:
        return ""
    own = conversation.messages[end].message
    repaired = own.repairs(turn.calls) if kind == BARE else False
    # what is spelled as in the request of that turn was checked then
    alike = turn.spelling_before == conversation.strict_before(end)
    sent = conversation.ignored(end if alike else 0, end + 1)
    recorded = turn.reasonings[-1:] if alike else turn.reasonings
    if repaired is None or len(sent) != len(recorded):
        return None
    reasons = {dropped(ours, theirs) for ours, theirs in zip(sent, recorded, strict=True)}
    if None in reasons:
        return None
    return Reason.CALL_REPAIRED if repaired else max(filter(None, reasons), default="")


def _ends_at(turn: Turn | CachedTurn, conversation: Conversation, end: int) -> bool:
    """Whether the conversation of a turn is spelled as the messages up to and including the one at `end`."""
    spelled = extend(turn.spelling_before, turn.spelling) if turn.spelling else b""
    return spelled == conversation.messages[end].strict


def _pack_prompt(prompt: bytes) -> bytes:
    """The ids of a prompt, a checked JSON array; empty if one has over 32 bits: the engine refuses it."""
    try:
        return ids.pack(prompt)
    except InvalidIds:
        return b""


def _may_begin(turn: Turn, packed: bytes) -> bool:
    """Whether the completion of a turn is at its position in a prompt of packed ids."""
    start = 4 * turn.prompt_tokens
    return packed[start : start + len(turn.completion)] == turn.completion != b""
