"""Processes that write: `python -m tests.stores.store_writer URL PROCESSES CHAINS TURNS MAX_BYTES`.

Prints the id of each turn once it was added. 0-0, 0-1, ... are the first one's rollouts, each a chain of
turns. A single process is this one itself.
"""

import asyncio
import multiprocessing
import sys

from proxy.history.store import Limits, Store
from proxy.stores.urls import make_store
from tests.stores.store_utils import key_of, make_turn, opened


async def _chain(store: Store, rollout: str, turns: int) -> None:
    parent = None
    for _ in range(turns):
        turn = make_turn(rollout, parent=parent)
        await store.add([turn], [[key_of(turn.id), key_of(rollout)]])
        # one write for each line: all share one pipe
        sys.stdout.write(turn.id + "\n")
        sys.stdout.flush()
        parent = turn.id


async def _write(url: str, process: int, chains: int, turns: int, max_bytes: int) -> None:
    async with opened(url, Limits(max_bytes=max_bytes)) as store:
        await asyncio.gather(*(_chain(store, f"{process}-{number}", turns) for number in range(chains)))


def _run(url: str, process: int, numbers: list[int]) -> None:
    asyncio.run(_write(url, process, *numbers))


def _main(url: str, processes: int, *numbers: int) -> int:
    if processes == 1:
        _run(url, 0, list(numbers))
        return 0
    # imports what the store needs once, before the processes part
    make_store(url, Limits())
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_run, args=(url, number, list(numbers))) for number in range(processes)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    return max(abs(writer.exitcode or 0) for writer in writers)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], *map(int, sys.argv[2:])))
