"""The documents of a Redis store. See `DocumentStore`."""

import time
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from proxy.history.store import Limits
from proxy.stores.eviction import STEP
from proxy.stores.packed import pack_document, unpack_document

_DROP = """
local p = KEYS[1]
local function drop(id)
    local size = redis.call('STRLEN', p .. 'document:' .. id)
    redis.call('HINCRBY', p .. 'totals', 'document_bytes', 0 - size)
    redis.call('DEL', p .. 'document:' .. id)
    redis.call('ZREM', p .. 'documents', id)
end
"""
_KEEP = (
    _DROP
    + """
local id, now, packed, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
if redis.call('ZADD', p .. 'documents', 'NX', now, id) == 0 then
    return
end
redis.call('SET', p .. 'document:' .. id, packed)
local left = redis.call('HINCRBY', p .. 'totals', 'document_bytes', #packed)
while left > most do
    drop(redis.call('ZRANGE', p .. 'documents', 0, 0)[1])
    left = tonumber(redis.call('HGET', p .. 'totals', 'document_bytes'))
end
"""
)
"""Arguments: id, now, packed document, bytes allowed."""
_READ = """
local p = KEYS[1]
local found = {}
for i = 2, #ARGV do
    local kept = redis.call('ZSCORE', p .. 'documents', ARGV[i])
    if kept and tonumber(kept) >= tonumber(ARGV[1]) then
        found[#found + 1] = ARGV[i]
        found[#found + 1] = redis.call('GET', p .. 'document:' .. ARGV[i])
    end
end
return found
"""
"""Arguments: time since which they were kept, ids. Reply: id, packed document, id, ..."""
_DELETE = (
    _DROP
    + """
if not redis.call('ZSCORE', p .. 'documents', ARGV[1]) then
    return 0
end
drop(ARGV[1])
return 1
"""
)
"""Argument: id. Reply: 1 if it was there."""
_DROP_OLD = (
    _DROP
    + """
local old = redis.call('ZRANGEBYSCORE', p .. 'documents', '-inf', '(' .. ARGV[1], 'LIMIT', 0, ARGV[2])
for _, id in ipairs(old) do
    drop(id)
end
return #old
"""
)
"""Arguments: time before which documents are dropped, number to drop in one step. Reply: number dropped."""


class _Run(Protocol):
    """Runs a script, with the prefix of all names as its key."""

    def __call__(self, script: str, *args: Any) -> Awaitable[Any]: ...


class RedisDocuments:
    """The documents in the server of a store."""

    def __init__(self, run: _Run, limits: Limits) -> None:
        self._run = run
        self._limits = limits

    async def keep(self, document: str, content: bytes) -> None:
        """See `DocumentStore.keep`."""
        packed = await pack_document(content)
        if len(packed) > self._limits.document_bytes:
            return
        await self._run(_KEEP, document, repr(time.time()), packed, self._limits.document_bytes)

    async def read(self, documents: Sequence[str]) -> dict[str, bytes]:
        """See `DocumentStore.read`."""
        if not documents:
            return {}
        found = await self._run(_READ, repr(time.time() - self._limits.max_age_s), *documents)
        return {
            name.decode(): unpack_document(packed)
            for name, packed in zip(found[::2], found[1::2], strict=True)
        }

    async def delete(self, document: str) -> bool:
        """See `DocumentStore.delete`."""
        return bool(await self._run(_DELETE, document))

    async def drop_old(self) -> None:
        """Drop what is too old."""
        oldest = repr(time.time() - self._limits.max_age_s)
        while await self._run(_DROP_OLD, oldest, STEP) == STEP:
            pass
