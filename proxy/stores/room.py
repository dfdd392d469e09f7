"""Making room in a store that others use meanwhile."""

from collections.abc import Awaitable, Callable

from proxy.history.store import Evicted
from proxy.stores.packed import together

Step = Callable[[], Awaitable[Evicted]]
"""Lets some rollouts go; none, if there is no need to."""


async def repeat(step: Step) -> Evicted:
    """Take a step until there is nothing left to do: steps are short, so that others get their turn."""
    total = Evicted()
    while (gone := await step()).rollouts:
        total = together(total, gone)
    return total


class Room:
    """Lets one task at a time make room: what others ask of it meanwhile, it does for them."""

    def __init__(self) -> None:
        self._busy = False
        self._asked = False

    async def make(self, step: Step) -> Evicted:
        """Repeat a step, if no other task does. Returns what left through this call."""
        self._asked = True
        if self._busy:
            return Evicted()
        self._busy = True
        total = Evicted()
        try:
            while self._asked:
                self._asked = False
                total = together(total, await repeat(step))
        finally:
            self._busy = False
        return total
