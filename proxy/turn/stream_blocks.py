"""The blocks of an engine's stream, with a limited wait for the next one."""

import asyncio
from collections.abc import AsyncIterator, Awaitable


class StreamBlocks:
    """Iterates over the blocks, and tells whether the next one arrives in time."""

    def __init__(self, blocks: AsyncIterator[bytes]) -> None:
        self._blocks = blocks
        self._next: asyncio.Task[bytes] | None = None
        """Reads the block that `arrives` waited for."""

    def __aiter__(self) -> "StreamBlocks":
        return self

    def __anext__(self) -> Awaitable[bytes]:
        """The next block. Raises what the stream raises."""
        # no coroutine of its own: this runs once for each block of a stream
        if self._next is None:
            return anext(self._blocks)
        task, self._next = self._next, None
        return task

    async def arrives(self, seconds: float) -> bool:
        """Whether the next block, the end or a failure of the stream arrives within `seconds`.

        It is still to be read afterwards.
        """
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._blocks))
        await asyncio.wait((self._next,), timeout=seconds)
        return self._next.done()

    async def aclose(self) -> None:
        """Stop waiting for the next block."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
            self._next = None
