"""Recognised turns of many interleaved conversations, for `gateway.py`: by store, length and state."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.command import progress
from benchmarks.gateway_compare import Selected, Timed, add_round
from benchmarks.gateway_run import Bench, Target, settle
from benchmarks.load import BadResponse
from benchmarks.processes import Cores, proxy, redis_server

STORES = ("SQLite", "Redis", "memory")
WHOLE, STREAMED = "whole", "streamed"
RESTARTED, RESTARTED_STREAMED = "restarted", "restarted, streamed"
STATES = (WHOLE, STREAMED, RESTARTED, RESTARTED_STREAMED)
_STORE_BYTES = 8 << 30
"""Nothing is evicted from a store: 1,000 conversations of 128k ids take more than the default."""
_CACHE_BYTES = 2 << 30
"""Nor from the cache."""


@dataclass(slots=True)
class Conversations:
    """All results."""

    lengths: list[str]
    timed: dict[tuple[str, str, str], Timed] = field(default_factory=dict)
    """By store, state and length."""
    problems: dict[str, str] = field(default_factory=dict)
    """By store."""


def measure_conversations(
    bench: Bench, cores: Cores, rounds: int, samples: int, selected: Selected
) -> Conversations:
    """Measure all stores, one after the other; with each, the lengths alternate."""
    results = Conversations(list(bench.loads.conversations))
    for store in STORES:
        if not selected("conversations", store):
            continue
        folder = bench.folder / store
        folder.mkdir()
        try:
            with _urls(store, cores, folder, results.lengths) as urls:
                _measure_store(bench, cores, store, urls, results, rounds, samples)
        except BadResponse as error:
            results.problems[store] = str(error)
    return results


def _measure_store(
    bench: Bench,
    cores: Cores,
    store: str,
    urls: Mapping[str, str],
    results: Conversations,
    rounds: int,
    samples: int,
) -> None:
    loads = bench.loads.conversations
    with _proxies(bench, cores, store, urls) as targets:
        for length, target in targets.items():
            progress(f"{store}: start {loads[length][False].conversations:,} conversations of {length} ids")
            bench.begin(target, loads[length][False])
            settle(target.running)
        for number in range(rounds):
            for length, target in targets.items():
                progress(f"{store}: round {number + 1} of {rounds}, {length} ids")
                for state, stream in ((WHOLE, False), (STREAMED, True)):
                    timed = results.timed.setdefault((store, state, length), Timed())
                    load = loads[length][stream]
                    add_round(bench, target, (load, load), timed, samples)
        positions = {length: target.positions for length, target in targets.items()}
    if store != "memory":
        _measure_restarted(bench, cores, store, urls, results, positions, rounds * samples)


def _measure_restarted(
    bench: Bench,
    cores: Cores,
    store: str,
    urls: Mapping[str, str],
    results: Conversations,
    positions: Mapping[str, Mapping[str, int]],
    samples: int,
) -> None:
    """The first request of each conversation in a new process, at most half of them for each state."""
    loads = bench.loads.conversations
    with _proxies(bench, cores, store, urls) as targets:
        for length, target in targets.items():
            progress(f"{store}: restarted, {length} ids")
            warm_up = bench.loads.columns[0].ours
            target.positions[warm_up.answer] = 1_000_000
            bench.add(Timed().added, target, (warm_up, warm_up), 20)
            target.positions.update(positions[length])
            for state, stream in ((RESTARTED, False), (RESTARTED_STREAMED, True)):
                load = loads[length][stream]
                timed = results.timed.setdefault((store, state, length), Timed())
                count = min(samples, load.conversations // 2)
                bench.add(timed.added, target, (load, load), count)


@contextmanager
def _proxies(bench: Bench, cores: Cores, store: str, urls: Mapping[str, str]) -> Iterator[dict[str, Target]]:
    """One tokenproxy for each length, so that none has conversations of another length in its cache."""
    flags = ["--store-max-bytes", str(_STORE_BYTES), "--cache-bytes", str(_CACHE_BYTES)]
    with ExitStack() as stack:
        targets = {}
        for length, url in urls.items():
            progress(f"{store}: start tokenproxy for {length} ids")
            log = bench.folder / store / f"{length}.log"
            running = stack.enter_context(proxy(cores.proxy, bench.engine.port, log, store=url, flags=flags))
            targets[length] = Target(store, running.port, running, ours=True)
        yield targets


@contextmanager
def _urls(store: str, cores: Cores, folder: Path, lengths: Sequence[str]) -> Iterator[dict[str, str]]:
    """The URL of the store for each length."""
    if store == "Redis":
        with redis_server(cores.engine, folder) as url:
            if url is None:
                raise BadResponse("not installed: run scripts/install-programs redis")
            base = url.rpartition("/")[0]
            yield {length: f"{base}/{number}" for number, length in enumerate(lengths)}
    elif store == "SQLite":
        yield {length: f"sqlite://{folder}/{length}.db" for length in lengths}
    else:
        yield dict.fromkeys(lengths, "memory:")
