"""Processes that write: `python -m tests.campaign.store.writers URL PROCESSES CHAINS TURNS BYTES`.

Prints the id of each turn after it was added. 0-0, 0-1, ... are the rollouts of the first process, each a
chain of turns.
"""

import asyncio
import multiprocessing
import sys
from collections.abc import Sequence

from tests.support.store_utils import add, entry, make_turn, opened
from tokenproxy.record.store import Limits, Store
from tokenproxy.store.urls import make_store


def _print(turn: str) -> None:
    # one write for each line: all processes share one pipe
    sys.stdout.write(turn + "\n")
    sys.stdout.flush()


async def _add_chain(store: Store, rollout: str, turns: int) -> None:
    parent = None
    for _ in range(turns):
        turn = make_turn(rollout, parent=parent)
        await add(store, turn, entry(turn.id, "ids"), entry("shared"))
        _print(turn.id)
        parent = turn.id


async def _write(url: str, process: int, chains: int, turns: int, max_bytes: int) -> None:
    async with opened(url, Limits(max_bytes=max_bytes)) as store:
        await asyncio.gather(*(_add_chain(store, f"{process}-{number}", turns) for number in range(chains)))


def _run(url: str, process: int, sizes: Sequence[int]) -> None:
    asyncio.run(_write(url, process, *sizes))


def _main(url: str, processes: int, *sizes: int) -> int:
    if processes == 1:  # this one itself, which a test kills
        _run(url, 0, sizes)
        return 0
    # imports what the store needs once, before the processes part
    make_store(url, Limits())
    fork = multiprocessing.get_context("fork")
    running = [fork.Process(target=_run, args=(url, number, sizes)) for number in range(processes)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    return max(abs(process.exitcode or 0) for process in running)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], *map(int, sys.argv[2:])))
