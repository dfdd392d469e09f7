"""Creates and runs the parts that use the record of turns."""

import asyncio
import logging
from functools import partial
from weakref import WeakSet

from tokenproxy.base.request import EchoPolicy, ThinkingPolicy
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.appending import Auditor
from tokenproxy.record.cache import TurnCache
from tokenproxy.record.claims import Pins, Tasks
from tokenproxy.record.completion import Completion
from tokenproxy.record.echo import Echoes
from tokenproxy.record.encoders import EncoderPool
from tokenproxy.record.feed import FeedWatch, IdleTime, finish_idle_later, report_consumers
from tokenproxy.record.images import ImageLoader
from tokenproxy.record.match import Matcher
from tokenproxy.record.planner import Planner
from tokenproxy.record.recorder import Recording
from tokenproxy.record.store import Store

log = logging.getLogger("tokenproxy")

EVICTION_INTERVAL_S = 60.0
"""Seconds between two searches for rollouts that are too old."""
_MOST_REASONS = 100
ALMOST_FULL = 0.9
"""Share of `store_max_bytes` at which the log tells once that evictions are near."""
_USED = 0.75
"""Share of the cache's memory that its entries may fill: those that grow leave holes in the heap."""


class History:
    """What requests share of the record of turns. One per application."""

    def __init__(
        self,
        store: Store,
        encoders: EncoderPool,
        metrics: Metrics,
        cache_bytes: int,
        auditor: Auditor,
        overflow: str = "error",
        finish_after_s: float = 0.0,
        images: ImageLoader | None = None,
        thinking_policy: ThinkingPolicy = ThinkingPolicy.KEEP,
        echo_policy: EchoPolicy = EchoPolicy.LENIENT,
        processed_logprobs_required: bool = False,
    ) -> None:
        """The arguments from `overflow` on, but `images`, are the settings of these names."""
        self.processed_logprobs_required = processed_logprobs_required
        self.auditor = auditor
        self.store = store
        self.encoders = encoders
        self.metrics = metrics
        self.tasks = Tasks(metrics)
        self.cache = TurnCache(int(cache_bytes * _USED))
        self.running: WeakSet[Recording] = WeakSet()
        """Of the requests that run."""
        self.pins = Pins(store, metrics)
        matcher = Matcher(store, self.cache, encoders, metrics, echo_policy)
        images = images or ImageLoader(encoders)
        renders = overflow == "render"
        self.planner = Planner(matcher, auditor, images, thinking_policy, renders)
        self.echoes = Echoes(matcher)
        self.named: dict[str, asyncio.Event] = {}
        """Of the requests that run with an Idempotency-Key, by a digest of it: set when they end."""
        self.feed_watch = FeedWatch(store)
        self._finish_after_s = finish_after_s
        self._told_fill = False
        self._told_odd: set[str] = set()

    async def open(self) -> None:
        """Open the store. Raises StoreError."""
        await self.store.open()
        run_forever = self.tasks.run_forever
        run_forever(self._evict_old, "old rollouts could not be evicted")
        run_forever(self.pins.renew, "rollouts in use are not kept from eviction")
        run_forever(self.feed_watch.poll, "the feed cannot be watched")
        consumers = partial(report_consumers, self.store, self.metrics, set())
        run_forever(consumers, "the consumers of the feed cannot be read")
        if self._finish_after_s:
            idle = partial(finish_idle_later, self.store, IdleTime(self._finish_after_s))
            run_forever(idle, "idle rollouts could not be finished")

    def report_odd(self, completion: Completion) -> None:
        """Count the chunks of a completion that were read slowly; the log names each reason once."""
        self.metrics.odd_chunks.inc(completion.odd)
        if completion.why_odd not in self._told_odd and len(self._told_odd) < _MOST_REASONS:
            self._told_odd.add(completion.why_odd)
            log.warning(
                "engines answer with something that is not known, which is read slowly and passed on: %s",
                completion.why_odd,
            )

    def forget(self, rollout: str) -> None:
        """Drop the turns of a deleted rollout from the cache, and do not record its running requests."""
        self.cache.drop(rollout)
        for recording in self.running:
            recording.dropped.add(rollout)

    async def aclose(self) -> None:
        """Finish recording, then close the store."""
        self.auditor.close()
        await self.tasks.aclose()
        await self.store.aclose()

    async def _evict_old(self) -> None:
        await asyncio.sleep(EVICTION_INTERVAL_S)
        evicted = await self.store.evict()
        evicted.report(self.metrics, "their last use was `store_max_age_s` ago")
        if evicted.fill >= ALMOST_FULL and not self._told_fill:
            self._told_fill = True
            log.warning("the store holds 90 % of `store_max_bytes`: raise it, or rollouts are soon evicted")
