"""Processes that write: `python -m tests.support.store_writer URL PROCESSES CHAINS TURNS MAX_BYTES`.

Prints the id of each turn after it was added. 0-0, 0-1, ... are the rollouts of the first process, each a
chain of turns. A single process is this one itself.
"""

import asyncio
import sys

from proxy.history.store import Limits, Store
from proxy.stores.urls import make_store
from tests.support.forked import run_forked
from tests.support.store_utils import add, entry, make_turn, opened


async def _add_chain(store: Store, rollout: str, turns: int) -> None:
    parent = None
    for _ in range(turns):
        turn = make_turn(rollout, parent=parent)
        await add(store, turn, entry(turn.id, "ids"), entry("shared"))
        # one write for each line: all processes share one pipe
        sys.stdout.write(turn.id + "\n")
        sys.stdout.flush()
        parent = turn.id


async def _write(url: str, process: int, chains: int, turns: int, max_bytes: int) -> None:
    async with opened(url, Limits(max_bytes=max_bytes)) as store:
        await asyncio.gather(*(_add_chain(store, f"{process}-{number}", turns) for number in range(chains)))


def _main(url: str, processes: int, *numbers: int) -> int:
    def run(process: int) -> None:
        asyncio.run(_write(url, process, *numbers))

    if processes == 1:
        run(0)
        return 0
    # imports what the store needs once, before the processes part
    make_store(url, Limits())
    return run_forked(processes, run)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], *map(int, sys.argv[2:])))
