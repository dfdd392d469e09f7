"""A fleet of modelled engines on stepped time, and agents that hold conversations on it."""

import asyncio
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from benchmarks.engine_model import BLOCK_IDS, FAST, EngineModel, Job, Speed
from tests.contract.fleet.memory_engine import MemoryEngine
from tests.support.stepped import now
from tokenproxy.base.http import JSON_HEADERS, BytesResponse, Response
from tokenproxy.fleet.choosing import Routing
from tokenproxy.fleet.fleet import Fleet
from tokenproxy.fleet.replica import Replica

SPEED = FAST.slower(14)
"""That of a real engine."""


class ModelledEngine(MemoryEngine):
    """An engine that takes the time of a real one, and evicts ids as it does."""

    def __init__(self, name: str, speed: Speed = SPEED) -> None:
        super().__init__(name)
        self.modelled = EngineModel(speed)
        self._timer: asyncio.TimerHandle | None = None
        self._running: dict[Job, asyncio.Future[None]] = {}
        self.describes = lambda path: self._metrics() if path == "/metrics" else None

    async def complete(self, job: Job) -> Response:
        """Sample a completion."""
        self._running[job] = future = asyncio.get_running_loop().create_future()
        self._advance()
        self.modelled.submit(now(), job)
        self._changed()
        await future
        return BytesResponse(200, list(JSON_HEADERS), b"{}")

    def _advance(self) -> None:
        for job in self.modelled.advance(now()):
            future = self._running.pop(job)
            if not future.done():
                future.set_result(None)

    def _changed(self) -> None:
        self._advance()
        if self._timer is not None:
            self._timer.cancel()
        if (at := self.modelled.next_change()) is not None:
            self._timer = asyncio.get_running_loop().call_at(at, self._changed)

    def _metrics(self) -> Response:
        blocks = self.modelled.speed.capacity_ids // BLOCK_IDS
        info = f'vllm:cache_config_info{{block_size="{BLOCK_IDS}",num_gpu_blocks="{blocks}"}} 1.0\n'
        return BytesResponse(200, [], info.encode())


@dataclass
class Agent:
    """A conversation: its first prompt, and what its turns add."""

    name: str
    opening: str
    """Agents with equal openings have equal first prompts."""
    opening_ids: int
    turns: Sequence[tuple[float, int, int]]
    """Seconds of the pause before each, its new ids, and how many it samples."""
    tenant: str = ""
    waits_s: list[float] = field(default_factory=list)
    """From each request to its response."""

    async def run(self, fleet: Fleet, start_s: float = 0.0) -> None:
        """Hold the conversation, and leave without a word."""
        await asyncio.sleep(start_s)
        first = [(self.opening, number) for number in range(self.opening_ids // BLOCK_IDS)]
        ids, holder = self.opening_ids, ""
        beginning = self.opening.encode().ljust(4 * ids, b".")
        for number, (pause_s, appended, sampled) in enumerate(self.turns):
            await asyncio.sleep(pause_s)
            ids += appended if number else 0
            own = range((ids + sampled) // BLOCK_IDS - len(first))
            blocks: list[Hashable] = [*first, *((self.name, block) for block in own)]
            job, began, ran = Job(blocks, ids, sampled), now(), ""

            async def work(replica: Replica, job: Job = job) -> Response:
                nonlocal ran
                ran = replica.name
                engine = replica.engine
                assert isinstance(engine, ModelledEngine)
                return await engine.complete(job)

            routing = Routing(
                conversation=self.name, holder=holder, ids=ids, context_ids=ids, completion=True,
                beginning=(beginning,), tenant=self.tenant,
            )  # fmt: skip
            response = await fleet.send(work, routing)
            await response.aclose()
            self.waits_s.append(now() - began)
            ids, holder = ids + sampled, ran
            fleet.conversations.measure(self.name, ids - sampled, sampled)


def agents(
    count: int,
    draw: random.Random,
    *,
    name: str = "agent",
    group: int = 8,
    opening_ids: int = 2048,
    turns: int = 8,
    pause_s: float = 2.0,
) -> list[Agent]:
    """Agents in groups of equal openings, whose turns add some 350 ids and sample some 150."""
    return [
        Agent(
            f"{name}-{number}",
            f"{name}-{number // group}",
            opening_ids,
            [
                (
                    draw.expovariate(1 / pause_s) if turn else 0.0,
                    draw.randrange(50, 650),
                    draw.randrange(30, 270),
                )
                for turn in range(turns)
            ],
        )
        for number in range(count)
    ]
