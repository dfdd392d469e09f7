"""The state of a fleet's weights in a store, with the errors that `proxy.fleet.weight_state` defines."""

import msgspec

from proxy.fleet.weight_state import FleetState, StateError
from proxy.history.store import Store, StoreError
from proxy.history.store_time import REQUEST_S, store_time

_NAME = "weights"


class StoredState:
    """The state of one fleet; a `StateStore`."""

    def __init__(self, store: Store, fleet: str, *, shared: bool) -> None:
        """A state that is not read yet.

        Args:
            fleet: its name in the store.
            shared: whether other processes may use the store.
        """
        self._store = store
        self._fleet = f"{fleet}/weights"
        self.shared = shared

    async def read(self) -> FleetState:
        """See `StateStore.read`."""
        try:
            with store_time(REQUEST_S):  # the caller reads it again soon
                stored = (await self._store.replica_changes(self._fleet)).get(_NAME)
        except StoreError as error:
            raise StateError(str(error)) from error
        if stored is None:
            return FleetState()
        try:
            return msgspec.json.decode(stored, type=FleetState)
        except msgspec.DecodeError as error:
            raise StateError(f"the store holds a weight state that cannot be read: {error}") from error

    async def write(self, state: FleetState) -> None:
        """See `StateStore.write`."""
        try:
            with store_time(REQUEST_S):
                await self._store.change_replica(self._fleet, _NAME, msgspec.json.encode(state).decode())
        except StoreError as error:
            raise StateError(str(error)) from error
