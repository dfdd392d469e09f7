"""Threads for tokenising and parsing, which would block the event loop.

Small work has its own threads and never waits for large work. Large work runs one at a time, so that
tokenising needs the memory of one text only. The total size of waiting and running work is limited.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tokenproxy.base.errors import Overloaded

T = TypeVar("T")

THREADS = 2
"""For small work. Requests share one core, and tokenisers give up the interpreter's lock."""
MAX_BYTES = 256 * 2**20
"""The most bytes of input that may be processed or wait."""
WORTH_A_THREAD_BYTES = 16_384
"""Bytes of input from which parsing, compressing or recording runs on a thread. With less input, the work
takes less time than handing it to a thread."""
LARGE = 2**18
"""Bytes of text beyond which tokenising is large work: it takes about 0.1 s."""
LARGE_PARSED = 2**22
"""Bytes of text beyond which parsing, which is faster, is large work."""
_RETRY_AFTER_S = 2


class EncoderPool:
    """Runs work on threads. One per application."""

    def __init__(self, threads: int = THREADS, max_bytes: int = MAX_BYTES) -> None:
        """`max_bytes`: the most bytes of input that may be processed or wait."""
        self._small = ThreadPoolExecutor(threads, "encode")
        self._large = ThreadPoolExecutor(1, "encode-large")
        self._max_bytes = max_bytes
        self.bytes_in_use = 0
        """Bytes of the input that is processed or waits."""

    async def run(
        self,
        work: Callable[[], T],
        size: int = 0,
        *,
        tokenises: bool = False,
        stop: threading.Event | None = None,
    ) -> T:
        """Run `work` on a thread. Work whose caller is cancelled while it waits is dropped at once.

        Args:
            size: bytes of its input; 0 for work that must not be refused.
            tokenises: whether it tokenises its input, and does not only parse it.
            stop: is set if the caller is cancelled while the work runs. Threads cannot be killed, so work
                that may take long checks it.

        Raises:
            Overloaded: with this work, the input would exceed `max_bytes`.
        """
        used = self.bytes_in_use
        if used and size and used + size > self._max_bytes:
            raise Overloaded(
                f"the proxy already tokenises or parses {used} bytes of messages: try again later",
                code="encoders_busy",
                retry_after=_RETRY_AFTER_S,
            )
        is_large = size > (LARGE if tokenises else LARGE_PARSED)
        future = (self._large if is_large else self._small).submit(work)
        self.bytes_in_use += size
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._give_back, size))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if stop is not None:
                stop.set()
            raise
        finally:
            # an error's traceback holds this frame: with the future in it, its input would stay in memory
            del future

    def _give_back(self, size: int) -> None:
        self.bytes_in_use -= size

    def shutdown(self) -> None:
        """Wait for the work, and end the threads."""
        self._small.shutdown()
        self._large.shutdown()
