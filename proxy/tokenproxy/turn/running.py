"""The requests that a process serves, and how it cuts them off when it stops.

`stopping` is set when the process gets a signal to stop: it still serves, and `/ready` reports it. Later
`cut` ends each running request and each new one with the error `Stopping`.
"""

import asyncio
from types import TracebackType
from typing import Any

from tokenproxy.base.errors import Stopping


class RunningRequests:
    """The requests that run. One per application, used from its event loop only."""

    def __init__(self) -> None:
        self.stopping = False
        """Whether the process got a signal to stop. Requests are still served."""
        self._cut = False
        self._blocks: set[Cuttable] = set()

    def cuttable(self) -> "Cuttable":
        """A block of the current task that `cut` ends with `Stopping`; see `Cuttable`."""
        return Cuttable(self)

    def cut(self) -> int:
        """End the requests inside a `cuttable` block, and refuse new ones. Returns how many there were."""
        self.stopping = self._cut = True
        blocks = list(self._blocks)
        for block in blocks:
            block.cancel()
        return len(blocks)

    def enter(self, block: "Cuttable") -> None:
        """Count a block. Raises Stopping after `cut`."""
        if self._cut:
            raise _stopping()
        self._blocks.add(block)

    def leave(self, block: "Cuttable") -> None:
        """Forget a block."""
        self._blocks.discard(block)


class Cuttable:
    """A `with` block that raises `Stopping` at its current `await` when `cut` is called.

    It works as `asyncio.timeout` does: the task is cancelled, so that everything inside cleans up as for a
    client that leaves, and the cancellation becomes an exception at the end of the block.
    """

    def __init__(self, running: RunningRequests) -> None:
        self._running = running
        self._cancelled = False

    def __enter__(self) -> "Cuttable":
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] = task
        self._cancelling = task.cancelling()
        self._running.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.leave(self)
        # a task that its client's disconnect cancels at the same time stays cancelled
        if (
            self._cancelled
            and self._task.uncancel() <= self._cancelling
            and kind is not None
            and issubclass(kind, asyncio.CancelledError)
        ):
            raise _stopping() from error

    def cancel(self) -> None:
        """End the block."""
        self._cancelled = True
        self._task.cancel()


def _stopping() -> Stopping:
    return Stopping(
        "the proxy stopped before the response was complete: send the request again", code="stopping"
    )
