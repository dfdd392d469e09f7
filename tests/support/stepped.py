"""An event loop whose time stands still while anything can run, and then jumps to the next timer."""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

_ARRIVAL_S = 0.05
"""How long what was written to a socket may be on its way to another one of the loop."""


class _JumpingSelector(selectors.DefaultSelector):
    now = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        patience_s = timeout
        if timeout is not None:
            has_sockets = len(self.get_map()) > 1  # besides the loop's own
            patience_s = _ARRIVAL_S if has_sockets and timeout > 0 else 0
        ready = super().select(patience_s)
        if not ready and timeout is not None:
            self.now += max(timeout, 0.0)
        return ready


class _SteppedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.stepped = _JumpingSelector()
        super().__init__(self.stepped)

    def time(self) -> float:
        return self.stepped.now


def stepped(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on such a loop: `elapse(10)` lets all happen that is due in 10 s, at once."""

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=_SteppedLoop) as runner:
            runner.run(test(*arguments, **fixtures))

    return run


def now() -> float:
    """The time of the running loop: the `clock` of what is tested."""
    return asyncio.get_running_loop().time()


async def elapse(seconds: float) -> None:
    """Let so much time of the stepped loop pass, and all happen that is due in it."""
    assert isinstance(asyncio.get_running_loop(), _SteppedLoop)
    await asyncio.sleep(seconds)


def block(seconds: float) -> None:
    """Let time pass in which the event loop runs nothing."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _SteppedLoop)
    loop.stepped.now += seconds


async def settled() -> None:
    """Let everything run that can run now."""
    for _ in range(20):
        await asyncio.sleep(0)
