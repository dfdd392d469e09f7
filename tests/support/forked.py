"""Several processes that do the same at the same time."""

import multiprocessing
from collections.abc import Callable


def run_forked(processes: int, work: Callable[[int], None]) -> int:
    """Call `work` with 0, 1, ... in a process each, and wait for all.

    What the work needs must be imported before: each process inherits it.

    Returns:
        the largest exit code, signals as positive numbers.
    """
    fork = multiprocessing.get_context("fork")
    running = [fork.Process(target=work, args=(number,)) for number in range(processes)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    return max(abs(process.exitcode or 0) for process in running)
