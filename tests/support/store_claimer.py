"""Processes that claim the same turns: `python -m tests.support.store_claimer URL PROCESSES TURN...`.

Prints the id of a turn each time that a process has claimed it.
"""

import asyncio
import sys

from proxy.history.store import Limits
from proxy.stores.urls import make_store
from tests.support.forked import run_forked
from tests.support.store_utils import opened


async def _claim(url: str, turns: list[str]) -> None:
    async with opened(url) as store:
        for turn in turns:
            if await store.claim(turn):
                sys.stdout.write(turn + "\n")
                sys.stdout.flush()


def _main(url: str, processes: int, turns: list[str]) -> int:
    make_store(url, Limits())
    return run_forked(processes, lambda _: asyncio.run(_claim(url, turns)))


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
