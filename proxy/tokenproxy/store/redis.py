"""A store in Redis or Valkey (6.2 or newer), for proxies on several machines: one server, or a cluster.

A turn is recorded in three steps: its index entries, each under its own key; the turn, in the slot of its
rollout; then the rollout in the list of sessions. A process that ends in between leaves entries without a
turn, so that nothing under their keys is continued, or turns that the next call for the rollout counts.

The servers must not evict keys by themselves (`maxmemory-policy noeviction`): this store keeps its own
limits. Whether the data survive a restart of a server depends on the server's own settings.
"""

import logging
import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any, TypeVar

import msgspec

from tokenproxy.record.store import (
    ALL,
    DESCRIPTION,
    LAST_POSITION,
    Before,
    Evicted,
    FeedPage,
    Limits,
    Session,
    StoreUnusable,
    Unreadable,
)
from tokenproxy.record.turn import Candidate, CandidateGroup, Found, IndexedTurn, Turn, request_time
from tokenproxy.record.vocabulary import Cause
from tokenproxy.store import redis_scripts as scripts
from tokenproxy.store.eviction import Eviction
from tokenproxy.store.packed import (
    complete_path,
    fill_prompts,
    is_damaged,
    pack_entries,
    pack_parts,
    pack_turns,
    pack_value,
    text,
    unpack_entries,
    unpack_turns,
    unpack_values,
)
from tokenproxy.store.redis_servers import Call, RedisServers, read_redis_url

T = TypeVar("T")

log = logging.getLogger("tokenproxy")

SCHEMA_VERSION = b"5"
EVICTED_S = 3600
"""Seconds for which the index remembers a key under which all turns were evicted."""
_PAGE = 64
"""Turns of which a claim asks at once whether they are open."""


class RedisStore:
    """What a URL names: one server, a master that sentinels name, or a cluster."""

    def __init__(self, url: str, limits: Limits) -> None:
        """A store that is not open yet. Raises ValueError, which quotes no password."""
        self.limits = limits
        self.unreadable = Unreadable()
        self._servers = RedisServers(read_redis_url(url))
        self._eviction = Eviction(self)

    async def open(self) -> None:
        """See `Store.open`."""
        name = self._servers.url.name
        version, memory = await self._servers.run(scripts.OPEN, [scripts.PREFIX + b"version"], SCHEMA_VERSION)
        split = await self._servers.do(self._servers.client.exists(scripts.PREFIX + b"partitions"))
        if split or version != SCHEMA_VERSION:
            raise StoreUnusable(
                f"{name} has keys {scripts.PREFIX.decode()}* of another version of this program, which needs "
                f"version {SCHEMA_VERSION.decode()}: export them with the program that wrote them, then "
                "delete these keys or name another database"
            )
        if b"maxmemory_policy:allkeys-" in memory:
            log.warning(
                "%s drops keys by itself when its memory is full, and conversations with them: "
                "set its maxmemory-policy to noeviction",
                name,
            )
        self._eviction.clock_was_set(await self._server_time())

    async def aclose(self) -> None:
        """See `Store.aclose`."""
        await self._servers.aclose()

    async def add(
        self, session: Session, turns: Sequence[IndexedTurn] = (), *, fields: Collection[str] = DESCRIPTION
    ) -> Evicted:
        """See `Store.add`."""
        if not turns:
            return await self._save(session, ("", "", "", "0.0"), fields)
        members: list[tuple[bytes, bytes]] = []
        args: list[Any] = []
        for (turn, entries), packed in zip(turns, await pack_turns(turns), strict=True):
            members += [(_index_key(key), _member(ids, turn.id, session.id)) for key, ids in entries]
            above = pack_parts((each or "").encode() for each in (turn.parent, turn.prompt_turn))
            args += turn.id, turn.parent or "", above + pack_entries(entries), packed, turn.completion_tokens
        calls = [Call("SET", [_turn_key(turn.id)], [session.id]) for turn, _ in turns]
        calls += self._on_index(scripts.INDEX, members)
        await self._servers.run_each(calls, replicated=True)
        counts = await self._servers.run(scripts.ADD, _rollout_keys(session.id), *args)
        first_turn = repr(min([request_time(turn.id) for turn, _ in turns]))
        return await self._save(session, (*counts, first_turn), ())

    async def find(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        """See `Store.find`."""
        distinct = list(dict.fromkeys(keys))
        parts = self._parts(distinct)
        replies = await self._servers.run_each(
            [Call(scripts.FIND, list(map(_index_key, part)), []) for part in parts]
        )
        return dict(chain.from_iterable(map(_read_found, parts, replies)))

    async def claim(self, key: bytes, ids: bytes) -> str | None:
        """See `Store.claim`. The newest turns are tried first, page by page."""
        low, high = b"[" + pack_parts([ids]), b"(" + pack_parts([ids]) + b"\xff"
        while True:
            page = ("LIMIT", 0, _PAGE)
            [members] = await self._servers.run_each(
                [Call("ZREVRANGEBYLEX", [_index_key(key)], [high, low, *page])]
            )
            candidates = [_candidate(member) for member in members]
            states = await self._servers.run_each(
                [Call("HGET", [_rollout_keys(each.rollout)[2]], [each.turn]) for each in candidates]
            )
            for candidate, state in zip(candidates, states, strict=True):
                names = _rollout_keys(candidate.rollout)
                if (
                    candidate.turn
                    and state is None
                    and await self._servers.run(scripts.CLAIM, names, candidate.turn)
                ):
                    return candidate.turn
            if len(members) < _PAGE:
                return None
            high = b"(" + members[-1]

    async def release(self, turn: str) -> None:
        """See `Store.release`."""
        if rollout := await self._rollout_of(turn):
            await self._servers.run(scripts.RELEASE, _rollout_keys(rollout), turn)

    async def pin(self, rollout: str, until: float) -> bool:
        """See `Store.pin`."""
        return bool(await self._run_list(scripts.PIN, rollout, repr(time.time()), repr(until)))

    async def path(self, turn: str, limit: int = ALL) -> list[Turn]:
        """See `Store.path`."""
        if (rollout := await self._rollout_of(turn)) is None:
            return []
        found = await self._servers.run(scripts.PATH, _rollout_keys(rollout), turn, limit)
        return complete_path(turn, unpack_turns(_pairs(found), self.unreadable), limit)

    async def turns(self, rollout: str) -> list[Turn]:
        """See `Store.turns`."""
        packed = await self._servers.do(self._servers.client.hgetall(_rollout_keys(rollout)[0]))
        turns = unpack_turns(packed.items(), self.unreadable)
        return fill_prompts((turns[name] for name in sorted(turns)), turns)

    async def newest(self, rollout: str, limit: int) -> list[str]:
        """See `Store.newest`."""
        ids = await self._servers.do(self._servers.client.hkeys(_rollout_keys(rollout)[0]))
        return [text(turn) for turn in sorted(ids, reverse=True)[:limit]]

    async def session(self, rollout: str) -> Session | None:
        """See `Store.session`."""
        return next(iter((await self._list(1, "one", rollout))[1]), None)

    async def sessions(
        self, *, limit: int, tenant: str | None = None, before: float = math.inf
    ) -> list[Session]:
        """See `Store.sessions`."""
        name = "used" if tenant is None else f"used:{tenant}"
        return (await self._list(limit, "down", name, "-inf", f"({before!r}"))[1]

    async def delete(self, rollout: str) -> bool:
        """See `Store.delete`."""
        return await self.remove(rollout, math.inf)

    async def finish(self, rollout: str, cause: Cause, rewards: Mapping[str, float] | None = None) -> bool:
        """See `Store.finish`."""
        pairs = [arg for turn, reward in (rewards or {}).items() for arg in (turn, repr(float(reward)))]
        return bool(await self._run_list(scripts.FINISH, rollout, cause, int(time.time() * 1e6), *pairs))

    async def feed(self, after: int, *, limit: int, tenant: str | None = None) -> FeedPage:
        """See `Store.feed`."""
        name = "feed" if tenant is None else f"feed:{tenant}"
        (_, last, own_end, waiting), sessions = await self._list(
            limit, "up", name, f"({after}", f"({LAST_POSITION}"
        )
        return FeedPage(last if tenant is None else own_end, waiting, sessions)

    async def put(
        self,
        space: str,
        name: str,
        value: bytes | None,
        *,
        keep_s: float | None = None,
        before: Before = ...,
        most: int = ALL,
    ) -> bool:
        """See `Store.put`."""
        now = time.time()
        expires = "+inf" if keep_s is None else repr(now + keep_s)
        args: list[Any] = [
            name,
            await pack_value(value),
            expires,
            repr(now),
            self.limits.bytes_of(space),
            most,
        ]
        if before is not ...:
            args.append(await pack_value(before))
        kept = bool(await self._servers.run(scripts.PUT, _space_keys(space), *args))
        if kept or before is not None:
            return kept
        damaged = [value for _, value in await self._packed(space, [name]) if is_damaged(value)]
        return bool(
            damaged and await self._servers.run(scripts.PUT, _space_keys(space), *args[:-1], damaged[0])
        )

    async def get(
        self, space: str, names: Sequence[str] | None = None, *, complete: bool = False
    ) -> dict[str, bytes]:
        """See `Store.get`."""
        found = await self._packed(space, names)
        return unpack_values(found, space, self.unreadable, complete=complete)

    async def _packed(self, space: str, names: Sequence[str] | None) -> Iterable[tuple[bytes, bytes]]:
        wanted = ("*",) if names is None else ("", *dict.fromkeys(names))
        return _pairs(await self._servers.run(scripts.GET, _space_keys(space), repr(time.time()), *wanted))

    async def evict(self) -> Evicted:
        """See `Store.evict`."""
        for rollout in await self._run_list(scripts.REMOVED):
            await self._remove_turns(text(rollout), EVICTED_S)
        # the server's clock: the proxies' may differ
        return await self._eviction.of_old(await self._server_time())

    async def oldest(self, after: float, limit: int) -> tuple[int, list[Session]]:
        """See `Evicting.oldest`."""
        (held, *_), sessions = await self._list(limit, "up", "used", f"({after!r}", "+inf")
        return held, sessions

    async def remove(self, rollout: str, now: float) -> bool:
        """See `Evicting.remove`."""
        if not await self._run_list(scripts.REMOVE, rollout, repr(now)):
            return False
        await self._remove_turns(rollout, EVICTED_S if now < math.inf else 0)
        return True

    async def _save(self, session: Session, counts: Sequence[Any], replaced: Collection[str]) -> Evicted:
        """Count turns of a session, or describe it."""
        fields = (session.tenant, int(session.explicit), repr(session.created))
        commands = [(name, "HSET" if name in replaced else "HSETNX") for name in DESCRIPTION]
        described = [part for name, set_it in commands for part in (set_it, name, getattr(session, name))]
        args = (repr(time.time()), *counts, int(session.ambiguous), *fields, *described)
        size = await self._run_list(scripts.SAVE, session.id, *args)
        return await self._eviction.run(session.id) if size > self.limits.max_bytes else Evicted()

    async def _list(self, limit: int, *args: Any) -> tuple[list[int], list[Session]]:
        """The four numbers that `LIST` replies, and the sessions without those that are damaged.

        Args:
            limit: of the sessions that are returned: fewer means that there are no more.
        """
        damaged = 0
        while True:
            asked = max(limit, 0) + damaged
            parts = _read_reply(
                await self._run_list(scripts.LIST, *args, *([asked] if len(args) > 2 else []))
            )
            numbers = [int(float(next(parts))) for _ in range(4)]
            listed = [dict(_pairs(islice(parts, int(count)))) for count in parts]
            sessions = [session for fields in listed if (session := self._session(fields))]
            if len(sessions) >= limit or len(listed) < asked:
                return numbers, sessions[: max(limit, 0)]
            damaged = len(listed) - len(sessions)

    def _session(self, fields: dict[bytes, bytes]) -> Session | None:
        """The session of a hash; None if it cannot be read."""
        return self.unreadable.read(f"session {text(fields.get(b'id', b''))}", _session_from, fields)

    async def _remove_turns(self, rollout: str, remembered_s: int) -> None:
        """Remove the turns of a rollout that is no longer in the list, and what finds them."""
        removed = list(_pairs(await self._servers.run(scripts.REMOVE_TURNS, _rollout_keys(rollout))))
        members = [
            (_index_key(entry.key), _member(entry.ids, turn.decode(), rollout))
            for turn, packed in removed
            for entry in unpack_entries(packed)[1:]  # the first pair are parent and prompt_turn
        ]
        calls = [Call("UNLINK", [_turn_key(turn.decode())], []) for turn, _ in removed]
        await self._servers.run_each(calls + self._on_index(scripts.UNINDEX, members, remembered_s))
        await self._servers.run_each([Call("SREM", [scripts.SESSIONS + b"removed"], [rollout])])

    def _on_index(self, script: str, members: Sequence[tuple[bytes, bytes]], *args: Any) -> list[Call]:
        """Calls of a script for keys of the index, each with a member."""
        return [
            Call(script, [key for key, _ in part], [*args, *(each for _, each in part)])
            for part in self._parts(members)
        ]

    def _parts(self, keyed: Sequence[T]) -> list[Sequence[T]]:
        """What belongs to keys of the index, in parts for one script: in a cluster one for each key."""
        if self._servers.url.kind == "cluster":
            return [[each] for each in keyed]
        return [keyed] if keyed else []

    async def _rollout_of(self, turn: str) -> str | None:
        rollout = await self._servers.do(self._servers.client.get(_turn_key(turn)))
        return None if rollout is None else text(rollout)

    async def _server_time(self) -> float:
        seconds, microseconds = await self._run_list("return redis.call('TIME')")
        return int(seconds) + int(microseconds) / 1e6

    async def _run_list(self, script: str, *args: Any) -> Any:
        """Run a script of the list of sessions."""
        return await self._servers.run(script, (scripts.SESSIONS, scripts.SESSIONS + b"moving"), *args)


def _index_key(key: bytes) -> bytes:
    return scripts.PREFIX + b"key:" + key


def _turn_key(turn: str) -> bytes:
    return scripts.PREFIX + b"turn:" + turn.encode()


def _rollout_keys(rollout: str) -> list[bytes]:
    """The names of turns, entries and state of a rollout: all in one slot."""
    prefix = scripts.PREFIX + b"{s/" + rollout.encode() + b"}:"
    return [prefix + part for part in (b"turns", b"entries", b"state")]


def _space_keys(space: str) -> list[bytes]:
    prefix = scripts.PREFIX + b"{v/" + space.encode() + b"}:"
    return [prefix + part for part in (b"values", b"expiry", b"bytes")]


def _member(ids: bytes, turn: str, rollout: str) -> bytes:
    """See `redis_scripts`."""
    return pack_parts((ids, turn.encode())) + rollout.encode()


def _candidate(member: bytes) -> Candidate:
    with suppress(IndexError):
        start = member[0] + 2
        end = start + member[start - 1]
        return Candidate(text(member[start:end]), text(member[end:]))
    return Candidate("", "")  # it is damaged, and counts as an evicted one


def _read_found(keys: Sequence[bytes], packed: bytes) -> Iterator[tuple[bytes, Found]]:
    """The reply of `FIND`. If the first and the last member have equal ids, all have."""
    parts = _read_reply(packed)
    for number in parts:
        total, first, listed = int(next(parts)), next(parts), int(next(parts))
        groups: dict[bytes, list[Candidate]] = {}
        for member in islice(parts, listed):
            groups.setdefault(_ids(member), []).append(_candidate(member))
        only = len(groups) == 1 and _ids(first) in groups
        yield (
            keys[int(number)],
            Found(total, [CandidateGroup(ids, total if only else len(of), of) for ids, of in groups.items()]),
        )


def _ids(member: bytes) -> bytes:
    return member[1 : 1 + member[0]] if member else b""


def _read_reply(packed: bytes) -> Iterator[bytes]:
    """The values of a script's reply: b"5:hello2:ab" becomes b"hello", b"ab"."""
    start = 0
    while start < len(packed):
        colon = packed.index(b":", start)
        start = colon + 1 + int(packed[start:colon])
        yield packed[colon + 1 : start]


def _session_from(fields: dict[bytes, bytes]) -> Session:
    """The session from the fields of its hash."""
    described = {name: fields.pop(name.encode()) for name in DESCRIPTION}
    texts = {name.decode(): value.decode() for name, value in fields.items()}
    rewards = {name[7:]: float(value) for name, value in texts.items() if name.startswith("reward:")}
    return msgspec.convert({**texts, **described, "rewards": rewards}, Session, strict=False)


def _pairs(replies: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    values = iter(replies)
    return zip(values, values, strict=True)
