"""The changes of a fleet in a store, with words and errors as `proxy.fleet.changes` defines them."""

from proxy.fleet.changes import ChangesError, ReplicaChange
from proxy.history.store import Store, StoreError
from proxy.history.store_time import REQUEST_S, store_time
from proxy.urls import normalise_base_url, without_credentials


class StoredChanges:
    """The changes of one fleet; a `ChangeStore`."""

    def __init__(self, store: Store, fleet: str) -> None:
        """`fleet`: its name in the store."""
        self._store = store
        self._fleet = fleet

    async def read(self) -> dict[str, ReplicaChange]:
        """See `ChangeStore.read`."""
        try:
            with store_time(REQUEST_S):  # it is read again at the next interval
                stored = await self._store.replica_changes(self._fleet)
        except StoreError as error:
            raise ChangesError(str(error)) from error
        return {_checked(url): _change(url, word) for url, word in stored.items()}

    async def write(self, name: str, change: ReplicaChange | None) -> None:
        """See `ChangeStore.write`."""
        try:
            await self._store.change_replica(self._fleet, name, change)
        except StoreError as error:
            raise ChangesError(str(error)) from error


def _checked(url: str) -> str:
    """A URL of the store. Raises ChangesError where no proxy can have written it."""
    try:
        usable = without_credentials(normalise_base_url(url)) == url
    except ValueError:
        usable = False
    if not usable:
        raise ChangesError("the store holds a change of a replica whose URL is none")
    return url


def _change(url: str, word: str) -> ReplicaChange:
    try:
        return ReplicaChange(word)
    except ValueError:
        raise ChangesError(f"the store holds a change of {url} that this version does not know") from None
