"""The words that the processes of a fleet share, in a store: a `SharedWords` of `fleet/weight_state.py`."""

from collections.abc import Awaitable
from time import monotonic

from tokenproxy.fleet.weight_state import SharedError
from tokenproxy.record.store import Store, StoreError
from tokenproxy.record.store_time import REQUEST_S, StoreTime, running_store_time, within


class StoredWords:
    """The words of one fleet."""

    def __init__(self, store: Store, fleet: str, *, shared: bool = True) -> None:
        """Words that are not read yet.

        Args:
            fleet: its name in the store.
            shared: whether other processes may use the store.
        """
        self._store = store
        self._space = f"fleets/{fleet}"
        self.shared = shared

    async def read(self) -> dict[str, str]:
        """See `SharedWords.read`."""
        try:
            # it is read again soon, and a request waits no longer for it than for the store
            with StoreTime(min(REQUEST_S, running_store_time().left)):
                stored = await self._store.get(self._space, complete=True)
            return {name: word.decode() for name, word in stored.items()}
        except (StoreError, UnicodeDecodeError) as error:
            raise SharedError(str(error)) from error

    async def write(self, name: str, word: str | None) -> None:
        """See `SharedWords.write`."""
        try:
            with StoreTime(REQUEST_S):
                await self._store.put(self._space, name, None if word is None else word.encode())
        except StoreError as error:
            raise SharedError(str(error)) from error

    async def wait(self, work: Awaitable[object]) -> None:
        """See `SharedWords.wait`."""
        limit, began = running_store_time(), monotonic()
        try:
            await within(max(0.0, limit.left), work)
        except TimeoutError as error:
            limit.left -= monotonic() - began
            raise SharedError("the request has waited for the store as long as it may") from error
