"""What the processes of a fleet share in a store: changes of its replicas, and the state of its weights."""

import msgspec

from proxy.fleet.changes import ChangesError, ReplicaChange
from proxy.fleet.weight_state import FleetState, StateError
from proxy.history.store import Store, StoreError
from proxy.history.store_time import REQUEST_S, store_time
from proxy.urls import normalise_base_url, without_credentials

_WEIGHTS = "weights"


class StoredChanges:
    """The changes of one fleet; a `ChangeStore`. They are values by the URLs of the replicas."""

    def __init__(self, store: Store, fleet: str) -> None:
        """`fleet`: its name in the store."""
        self._store = store
        self._space = f"replicas/{fleet}"

    async def read(self) -> dict[str, ReplicaChange]:
        """See `ChangeStore.read`."""
        try:
            with store_time(REQUEST_S):  # it is read again at the next interval
                stored = await self._store.get(self._space)
        except StoreError as error:
            raise ChangesError(str(error)) from error
        return {_checked(url): _change(url, word.decode()) for url, word in stored.items()}

    async def write(self, name: str, change: ReplicaChange | None) -> None:
        """See `ChangeStore.write`."""
        try:
            if change is None:
                await self._store.take(self._space, name)
            else:
                await self._store.put(self._space, name, change.encode())
        except StoreError as error:
            raise ChangesError(str(error)) from error


class StoredState:
    """The state of one fleet's weights; a `StateStore`."""

    def __init__(self, store: Store, fleet: str, *, shared: bool) -> None:
        """A state that is not read yet.

        Args:
            fleet: its name in the store.
            shared: whether other processes may use the store.
        """
        self._store = store
        self._fleet = fleet
        self.shared = shared

    async def read(self) -> FleetState:
        """See `StateStore.read`."""
        try:
            with store_time(REQUEST_S):  # the caller reads it again soon
                stored = (await self._store.get(_WEIGHTS, [self._fleet])).get(self._fleet)
        except StoreError as error:
            raise StateError(str(error)) from error
        try:
            return FleetState() if stored is None else msgspec.json.decode(stored, type=FleetState)
        except msgspec.DecodeError as error:
            raise StateError(f"the store holds a weight state that cannot be read: {error}") from error

    async def write(self, state: FleetState) -> None:
        """See `StateStore.write`."""
        try:
            with store_time(REQUEST_S):
                await self._store.put(_WEIGHTS, self._fleet, msgspec.json.encode(state))
        except StoreError as error:
            raise StateError(str(error)) from error


def _checked(url: str) -> str:
    """A URL of the store. Raises ChangesError where no proxy can have written it."""
    try:
        usable = without_credentials(normalise_base_url(url)) == url
    except ValueError:
        usable = False
    if not usable:
        raise ChangesError("the store holds a replica change with an invalid URL")
    return url


def _change(url: str, word: str) -> ReplicaChange:
    try:
        return ReplicaChange(word)
    except ValueError:
        raise ChangesError(f"the store holds a change of {url} that this version does not know") from None
