"""A model of one vLLM engine: prefix cache, queue, prefill and decode. It knows no clock and no network.

The caller, `engine`, passes the time. What it has in common with a real engine:

- a prompt's cached blocks need no prefill; the cache evicts what was used least recently, and never the
  blocks of a running request;
- requests wait in one queue while `running` requests run, or while their blocks do not fit into the cache;
- prompts are prefilled one after the other, and decoding slows down meanwhile (chunked prefill);
- the more sequences decode, the slower each of them is.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

BLOCK_IDS = 128
REPLICAS, SLOW, SLOW_FACTOR = 8, 3, 3.0
"""The fleet of `benchmarks.fleet`: how many engines, how many of them are slow, and how much slower."""
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast an engine is, and how much it holds."""

    prefill_per_s: float
    """Ids of prompts per second, of those that are not in the cache."""
    decode_per_s: float
    """Sampled ids per second of `n` sequences: each gets `decode_per_s / (n + half)`."""
    half: float
    """Number of sequences at which each has about half the speed of a single one."""
    during_prefill: float
    """Share of the decoding speed that is left while a prompt is prefilled."""
    running: int
    """Most requests that run at the same time; vLLM's --max-num-seqs."""
    capacity_ids: int
    """Ids that the cache holds."""

    def slower(self, factor: float) -> "Speed":
        """The same engine on a machine that is `factor` times slower."""
        prefill_per_s, decode_per_s = self.prefill_per_s / factor, self.decode_per_s / factor
        return replace(self, prefill_per_s=prefill_per_s, decode_per_s=decode_per_s)


FAST = Speed(112_000, 14_000, half=16, during_prefill=0.15, running=32, capacity_ids=160_000)
"""About 14 times as fast as a real engine; with 16 sequences each samples 440 ids/s."""


def fleet_speeds(fast: Speed = FAST, replicas: int = REPLICAS, slow: int = SLOW) -> list[Speed]:
    """The speeds of a fleet; the slow replicas are spread over it."""
    at = {round(number * replicas / slow) for number in range(slow)} if slow else set()
    return [fast.slower(SLOW_FACTOR) if number in at else fast for number in range(replicas)]


@dataclass(eq=False, slots=True)
class Job:
    """A request as the engine sees it."""

    blocks: Sequence[Hashable]
    """A key for each full block of prompt and completion. Equal keys are equal ids after equal ids."""
    prompt_ids: int
    completion_ids: int
    cached_ids: int = 0
    """Ids of the prompt that were in the cache, once the job runs."""


class PrefixCache:
    """Blocks of ids with their use counts. Unused blocks are evicted, least recently used first."""

    def __init__(self, capacity_ids: int) -> None:
        self._capacity = capacity_ids // BLOCK_IDS
        self._uses: dict[Hashable, int] = {}
        self._unused: OrderedDict[Hashable, None] = OrderedDict()

    def cached_blocks(self, blocks: Sequence[Hashable]) -> int:
        """The number of blocks at the beginning that are cached."""
        for number, block in enumerate(blocks):
            if block not in self._uses and block not in self._unused:
                return number
        return len(blocks)

    def fits(self, blocks: Sequence[Hashable]) -> bool:
        """Whether these blocks fit next to those in use."""
        return len(self._uses) + sum(block not in self._uses for block in blocks) <= self._capacity

    def hold(self, blocks: Sequence[Hashable]) -> None:
        """Use blocks; those that are not cached are now, and others are evicted for them."""
        for block in blocks:
            self._unused.pop(block, None)
            self._uses[block] = self._uses.get(block, 0) + 1
        while self._unused and len(self._uses) + len(self._unused) > self._capacity:
            self._unused.popitem(last=False)

    def release(self, blocks: Sequence[Hashable]) -> None:
        """Stop using blocks. They stay cached; the end of a sequence is evicted before its beginning."""
        for block in reversed(blocks):
            self._uses[block] -= 1
            if not self._uses[block]:
                del self._uses[block]
                self._unused[block] = None


@dataclass(slots=True)
class Totals:
    """What an engine did so far."""

    requests: int = 0
    prompt_ids: int = 0
    cached_ids: int = 0
    completion_ids: int = 0
    busy_s: float = 0.0
    """Time with at least one request."""


@dataclass(slots=True)
class EngineModel:
    """One engine. Call `advance` at the time that `next_change` returns, and before each `submit`."""

    speed: Speed
    totals: Totals = field(default_factory=Totals)
    _cache: PrefixCache = field(init=False)
    _waiting: deque[Job] = field(default_factory=deque)
    _prefilling: deque[tuple[Job, float]] = field(default_factory=deque)
    """Running jobs before their first id, with the ids that are left to prefill."""
    _decoding: list[tuple[float, int, Job]] = field(default_factory=list)
    """A heap of (value of `_decoded` at which it ends, order, job)."""
    _decoded: float = 0.0
    """Ids that a sequence would have, had it decoded from the beginning."""
    _now: float = 0.0
    _order: int = 0

    def __post_init__(self) -> None:
        self._cache = PrefixCache(self.speed.capacity_ids)

    def submit(self, now: float, job: Job) -> None:
        """Put a request into the queue."""
        self._pass_time(now)
        self._waiting.append(job)
        self._admit()

    def next_change(self) -> float | None:
        """The time at which a prefill or a request ends if nothing else arrives; None if nothing runs."""
        ends = []
        if self._prefilling:
            ends.append(self._prefilling[0][1] / self.speed.prefill_per_s)
        if self._decoding:
            ends.append(max(0.0, self._decoding[0][0] - self._decoded) / self._decode_speed())
        return self._now + min(ends) if ends else None

    def advance(self, now: float) -> list[Job]:
        """Let time pass up to `now`; returns the requests that have ended."""
        ended: list[Job] = []
        while (change := self.next_change()) is not None and change <= now + _EPSILON:
            self._pass_time(change)
            while self._prefilling and self._prefilling[0][1] <= 1e-3:
                job, _ = self._prefilling.popleft()
                self._order += 1
                heappush(self._decoding, (self._decoded + job.completion_ids, self._order, job))
            while self._decoding and self._decoding[0][0] <= self._decoded + _EPSILON * self._decoded + 1e-6:
                job = heappop(self._decoding)[2]
                self._cache.release(job.blocks)
                self.totals.completion_ids += job.completion_ids
                ended.append(job)
            self._admit()
        self._pass_time(now)
        return ended

    def _decode_speed(self) -> float:
        share = self.speed.during_prefill if self._prefilling else 1.0
        return share * self.speed.decode_per_s / (len(self._decoding) + self.speed.half)

    def _pass_time(self, now: float) -> None:
        passed = now - self._now
        if passed <= 0:
            return
        if self._prefilling or self._decoding:
            self.totals.busy_s += passed
        if self._decoding:
            self._decoded += passed * self._decode_speed()
        if self._prefilling:
            job, left = self._prefilling[0]
            self._prefilling[0] = (job, max(0.0, left - passed * self.speed.prefill_per_s))
        self._now = now

    def _admit(self) -> None:
        while self._waiting and (running := len(self._prefilling) + len(self._decoding)) < self.speed.running:
            job = self._waiting[0]
            # a request that never fits would wait for ever; alone it runs anyway
            if running and not self._cache.fits(job.blocks):
                return
            self._waiting.popleft()
            cached = self._cache.cached_blocks(job.blocks[: job.prompt_ids // BLOCK_IDS])
            # vLLM computes at least the last id of a prompt, which the first sampled id comes from
            job.cached_ids = min(cached * BLOCK_IDS, job.prompt_ids - 1)
            self._cache.hold(job.blocks)
            self._prefilling.append((job, float(job.prompt_ids - job.cached_ids)))
            self.totals.requests += 1
            self.totals.prompt_ids += job.prompt_ids
            self.totals.cached_ids += job.cached_ids
