"""The processes of `simulate.py`: the proxy on its own core; client, engine and Redis on the other one."""

import asyncio
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from redis import Redis

from benchmarks.gateway_loads import Corpus
from benchmarks.gateway_run import settle
from benchmarks.load import BadResponse
from benchmarks.processes import (
    Cores,
    Proxy,
    StartError,
    core_busy_s,
    get_json,
    pinned,
    process_cpu_s,
    proxy,
    redis_server,
    scale_engine,
)
from benchmarks.scale_case import SEED, Case
from benchmarks.scale_clients import Clients, Run, Script, write_script
from proxy.history.store import Limits
from proxy.stores.urls import make_store
from tokenization import ChatTokenizer

_STORE_BYTES = 8 << 30
"""Nothing is evicted."""
_SEARCHES, _SEARCH_KEYS = 500, 3
"""Keys of a look-up, as of a turn whose message before the last is found."""
_AOF = ("--appendonly", "yes", "--appendfsync", "everysec", "--auto-aof-rewrite-percentage", "0")


@dataclass(frozen=True, slots=True)
class Measured:
    """What some turns cost in reality. All of one turn, on average, but for `run` and `others`."""

    run: Run
    proxy_ms: float
    """CPU of the proxy."""
    client_ms: float
    engine_ms: float
    redis_ms: float
    """CPU of all threads of Redis."""
    redis_calls: float
    """Commands that Redis ran, those of scripts too."""
    scripts: float
    """Scripts that the proxy called in Redis."""
    redis_bytes: float
    """Bytes that Redis received and sent."""
    memory_bytes: float
    """By which Redis' memory grew."""
    aof_bytes: float
    """By which its append-only file grew."""
    client_bytes: float
    """Between client and proxy, both ways."""
    engine_bytes: float
    """Between proxy and engine, both ways."""
    others: tuple[float, float]
    """Share of the proxy's core and of the other core that other programs used."""

    @property
    def turns(self) -> int:
        """The number of turns."""
        return self.run.turns


@dataclass(slots=True)
class Bench:
    """The engine, Redis and a proxy in front of each store."""

    cores: Cores
    engine: int
    """Its port."""
    folder: Path
    """Of the logs."""
    redis_url: str
    redis: Any
    """A client of redis-py."""
    proxies: dict[str, Proxy]
    """By store: `Redis`, `memory`."""
    scripts: dict[str, Script]
    """By case."""
    _rollouts: int = field(default=0)

    def clients(self, case: Case) -> Clients:
        """Clients with rollouts of their own; the engine now gives the case's answers."""
        for path in (f"/use/{_slug(case)}", f"/service/{case.service_s!r}"):
            if get_json(self.engine, path) is None:
                raise BadResponse(f"the engine does not know {path}")
        self._rollouts += case.rollouts
        port = self.proxies[case.store].port
        return Clients(case, self.scripts[_slug(case)], port, self._rollouts - case.rollouts)

    def measure(self, case: Case, clients: Clients, turns: int = 0) -> Measured:
        """Take turns of all rollouts, 0 for all that are left, and find out what each cost.

        Raises:
            BadResponse: a response is an error, or a turn does not continue recorded ids.
        """
        running = self.proxies[case.store]
        settle(running)
        before, busy, start = self._counters(running), self._others(), time.perf_counter()
        try:
            run = clients.run(turns)
        except BadResponse as error:
            log = (self.folder / f"{case.store}.log").read_text()[-4000:]
            raise BadResponse(f"{case.name}: {error}\nThe proxy's log:\n{log}") from error
        seconds, busy_after = time.perf_counter() - start, self._others()
        settle(running)  # what is recorded after the answer counts too
        after = self._counters(running)
        used = {name: (after[name] - before[name]) / run.turns for name in after}
        ours = (used["proxy_s"] * run.turns, (used["engine_s"] + used["redis_s"]) * run.turns + run.cpu_s)
        others = [
            max(0.0, end - begin - own) / seconds
            for begin, end, own in zip(busy, busy_after, ours, strict=True)
        ]
        return Measured(
            run=run,
            proxy_ms=1000 * used["proxy_s"],
            client_ms=1000 * run.cpu_s / run.turns,
            engine_ms=1000 * used["engine_s"],
            redis_ms=1000 * used["redis_s"],
            redis_calls=used["redis_calls"],
            scripts=used["scripts"],
            redis_bytes=used["redis_bytes"],
            memory_bytes=used["memory"],
            aof_bytes=used["aof"],
            client_bytes=(run.sent_bytes + run.received_bytes) / run.turns,
            engine_bytes=used["engine_bytes"],
            others=(others[0], others[1]),
        )

    def search_ms(self) -> float:
        """CPU milliseconds of Redis to look up a conversation by the keys of its last messages."""
        return asyncio.run(self._search_ms())

    async def _search_ms(self) -> float:
        store = make_store(self.redis_url, Limits())
        draw, keys = random.Random(SEED), 0
        cpu_s = self._redis_cpu_s()
        try:
            while keys < _SEARCHES * _SEARCH_KEYS:
                await store.find([draw.randbytes(16) for _ in range(_SEARCH_KEYS)])
                keys += _SEARCH_KEYS
        finally:
            await store.aclose()
        return 1000 * (self._redis_cpu_s() - cpu_s) / _SEARCHES

    def _redis_cpu_s(self) -> float:
        redis = self.redis.info("cpu")
        return float(redis["used_cpu_user"] + redis["used_cpu_sys"])

    def _others(self) -> tuple[float, float]:
        """CPU seconds of all programs on the proxy's core and on the other core."""
        return core_busy_s(self.cores.proxy), core_busy_s(self.cores.engine)

    def _counters(self, running: Proxy) -> dict[str, float]:
        engine, redis = get_json(self.engine, "/totals"), self.redis.info("all")
        return {
            "proxy_s": process_cpu_s(running.pid),
            "engine_s": engine["cpu_s"],
            "engine_bytes": engine["read"] + engine["written"],
            "redis_s": redis["used_cpu_user"] + redis["used_cpu_sys"],
            "scripts": redis.get("cmdstat_evalsha", {}).get("calls", 0),
            "redis_calls": redis["total_commands_processed"],
            "redis_bytes": redis["total_net_input_bytes"] + redis["total_net_output_bytes"],
            "memory": redis["used_memory"],
            "aof": redis.get("aof_current_size", 0),
        }


@contextmanager
def open_bench(
    checkpoint: Path, cases: Sequence[Case], folder: Path, stores: Sequence[str] = ("Redis", "memory")
) -> Iterator[Bench]:
    """Start all processes, and write the texts of the cases.

    Raises:
        StartError: a process does not start, or Redis is not installed.
    """
    tokenizer = ChatTokenizer.load(checkpoint)
    corpus = Corpus(tokenizer)
    scripts = {_slug(case): write_script(case, tokenizer, corpus) for case in cases}
    answers = folder / "answers"
    answers.write_bytes(msgspec.msgpack.encode({name: script.canned for name, script in scripts.items()}))
    cores = Cores.pick()
    with ExitStack() as stack:
        url = stack.enter_context(redis_server(cores.engine, folder, _AOF))
        if url is None:
            raise StartError("Redis is not installed: run scripts/install-programs redis")
        engine = stack.enter_context(scale_engine(cores.engine, answers, checkpoint))
        urls = {"Redis": url, "memory": "memory:"}
        flags = ("--store-max-bytes", str(_STORE_BYTES))
        proxies = {
            store: stack.enter_context(
                proxy(cores.proxy, engine, folder / f"{store}.log", store=urls[store], flags=flags)
            )
            for store in stores
        }
        stack.enter_context(pinned(cores.client))
        yield Bench(cores, engine, folder, url, Redis.from_url(url), proxies, scripts)


def _slug(case: Case) -> str:
    """The name of a case as a part of a path."""
    return re.sub(r"\W+", "-", case.name)
