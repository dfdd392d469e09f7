"""The feed and the documents of a Redis store whose data are split into partitions.

Each partition numbers the rollouts that are finished in it. Positions are times; those of a partition are
equal to its number modulo the number of partitions, so no two are equal. That they become visible in their
order takes three rules:

- a rollout gets a position after all that any partition gave before its finishing began;
- a reader first asks all partitions for their last position, and takes the greatest one as its horizon;
- it reads only up to the horizon, and in the same step makes each partition give later positions only.

So when a reader got what is before a position, nothing is ever added before it. Reading needs all partitions:
while one does not respond, the feed fails, and goes on where it was.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from proxy.history.feed import Acknowledged, Cause, Consumer, FinishedRollout
from proxy.stores import redis_feed_scripts as scripts
from proxy.stores.redis_feed import read_arguments, read_finished
from proxy.stores.redis_servers import Call

if TYPE_CHECKING:
    from proxy.stores.redis import RedisStore
    from proxy.stores.redis_partitions import Partitions


class PartitionedFeed:
    """The feeds of all partitions as one."""

    def __init__(self, parts: "Partitions") -> None:
        self._parts = parts

    async def last(self) -> int:
        """The last position that any partition gave; smaller ones may still be given."""
        return max(map(int, await self._parts.run_each(scripts.END, 0)))

    async def finish(self, rollout: str, cause: Cause) -> bool:
        """See `FeedStore.finish`."""
        last = await self.last()
        return await self._parts.of(rollout).feed.finish(rollout, cause, last)

    async def finish_idle(self, before: float, limit: int) -> int:
        """See `FeedStore.finish_idle`. The order is that of use within each partition."""
        last, total, parts = await self.last(), 0, self._parts.all
        while parts and total < limit:
            share = -(-(limit - total) // len(parts))
            step = partial(_finish_idle, before=before, limit=share, floor=last)
            looked_at = await self._parts.each(step, parts)
            total += sum(looked_at)
            parts = [part for part, count in zip(parts, looked_at, strict=True) if count >= share]
        return total

    async def read(self, after: int, *, limit: int, tenant: str | None = None) -> list[FinishedRollout]:
        """See `FeedStore.read`."""
        horizon = await self.last()
        if horizon <= after or limit <= 0:
            return []
        calls = [
            Call(prefix, scripts.READ, (*read_arguments(prefix, after, limit, tenant), horizon))
            for prefix in self._parts.prefixes
        ]
        replies = await self._parts.servers.run_each(calls)
        return sorted(each for reply in replies for each in read_finished(reply))[:limit]

    async def end(self) -> int:
        """See `FeedStore.end`. Positions given from now on are greater."""
        ends = set(map(int, await self._parts.run_each(scripts.END, 0)))
        if len(ends) > 1:
            # a partition may have given a greater one meanwhile: then that is after the end
            await self._parts.run_each(scripts.END, max(ends))
        return max(ends)

    async def acknowledged(self, tenant: str, consumer: str) -> Acknowledged | None:
        """See `FeedStore.acknowledged`."""
        return await self._parts.all[0].feed.acknowledged(tenant, consumer)

    async def acknowledge(self, tenant: str, consumer: str, position: int) -> int:
        """See `FeedStore.acknowledge`. Every partition notes it, for what it evicts."""
        last = await self.last()
        return max(
            await self._parts.each(
                lambda part: part.feed.acknowledge(tenant, consumer, min(position, last), last)
            )
        )

    async def forget(self, tenant: str, consumer: str) -> bool:
        """See `FeedStore.forget`."""
        return any(await self._parts.each(lambda part: part.feed.forget(tenant, consumer)))

    async def consumers(self, tenant: str | None = None) -> list[Consumer]:
        """See `FeedStore.consumers`."""
        merged: dict[tuple[str, str], Consumer] = {}
        for found in await self._parts.each(lambda part: part.feed.consumers(tenant)):
            for consumer in found:
                name = (consumer.tenant, consumer.name)
                merged[name] = _add(merged[name], consumer) if name in merged else consumer
        return sorted(merged.values())


class PartitionedDocuments:
    """The documents of all partitions."""

    def __init__(self, parts: "Partitions") -> None:
        self._parts = parts

    async def keep(self, document: str, content: bytes) -> None:
        """See `DocumentStore.keep`."""
        await self._parts.of(document).documents.keep(document, content)

    async def read(self, documents: Sequence[str]) -> dict[str, bytes]:
        """See `DocumentStore.read`."""
        found: dict[str, bytes] = {}
        by_part: dict[int, list[str]] = {}
        for document in documents:
            by_part.setdefault(self._parts.number_of(document), []).append(document)
        for number, names in by_part.items():
            found |= await self._parts.all[number].documents.read(names)
        return found

    async def delete(self, document: str) -> bool:
        """See `DocumentStore.delete`."""
        return await self._parts.of(document).documents.delete(document)


def _add(first: Consumer, second: Consumer) -> Consumer:
    """What waits for a consumer in two partitions."""
    oldest = min((each.oldest for each in (first, second) if each.oldest), default=0)
    position = max(first.position, second.position)
    return Consumer(first.tenant, first.name, position, first.waiting + second.waiting, oldest)


async def _finish_idle(part: "RedisStore", *, before: float, limit: int, floor: int) -> int:
    return await part.feed.finish_idle(before, limit, floor)
