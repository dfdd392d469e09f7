"""What all processes of a fleet share through the store: words by name, and the state of its weights.

Law: a replica serves requests only if its weights are those of the fleet.

    problem(replica) is empty  <=>  no failure of it is recorded, and
                                    no version was set, or its engine reports the version that was set

One word in the store holds the state. The process that gets an admin call writes it; all others read it.
"""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from tokenproxy.base.errors import Unavailable

_STATE = "weights"
"""The name of the word that holds the state."""


class SharedError(Unavailable):
    """The store cannot be read or written; the message says why."""


class SharedWords(Protocol):
    """Words that the processes of a fleet share. Both methods may raise SharedError."""

    shared: bool
    """Whether other processes may use the store."""

    async def read(self) -> Mapping[str, str]:
        """All words, by name."""
        ...

    async def write(self, name: str, word: str | None) -> None:
        """Keep a word in place of the one before; None forgets it."""
        ...


class Failure(msgspec.Struct, frozen=True):
    """Why a replica left service."""

    path: str
    """The call that failed."""
    reason: str
    loading: bool = True
    """Whether its weights may differ from what their version says; False if it may still be paused."""


class FleetState(msgspec.Struct, frozen=True):
    """The state of a fleet's weights."""

    revision: int = 0
    """Counts how often the version was set. Two versions may have one name."""
    version: str | None = None
    """The version that every replica must have; None if none was set."""
    paused: str = ""
    """The mode in which the fleet was paused, or `sleep`; empty if it is not."""
    updating: str = ""
    """Path of the call that began an update which has not ended; empty if there is none."""
    group: tuple[str, ...] = ()
    """Names of the replicas in the trainer's process group; empty if it was not initialised."""
    failures: dict[str, Failure] = {}
    """Why replicas left service, by name."""
    aborts: int = 0
    """Counts the calls that abort requests: what they end is not resumed."""
    touched: float = 0.0
    """When the last step of an update was called, in seconds since the epoch. So each step changes the state:
    an update fails if that does not change for too long."""

    def lacks_weights(self, replica: str) -> bool:
        """Whether an update failed on a replica, and no other one of the fleet has begun there."""
        failure = self.failures.get(replica)
        return failure is not None and failure.loading

    def problem(self, replica: str, version: str | None) -> str:
        """Why a replica must not serve requests; empty if it may.

        Args:
            version: the version that its engine reports; None if it reports none.
        """
        failure = self.failures.get(replica)
        problems = [failure.reason] if failure is not None else []
        if self.version is not None and version is None:
            problems.append(
                f"it reports no weight version, and that of the fleet is {self.version}: run it with "
                "VLLM_SERVER_DEV_MODE=1, and update its weights"
            )
        elif self.version is not None and version != self.version:
            problems.append(
                f"its weights are version {version}, those of the fleet are {self.version}: "
                "update its weights"
            )
        return "; ".join(problems)


async def read_state(words: SharedWords) -> FleetState:
    """The state; the default one if none was written.

    Raises:
        SharedError: it cannot be read.
    """
    stored = (await words.read()).get(_STATE)
    try:
        return msgspec.json.decode(stored, type=FleetState) if stored is not None else FleetState()
    except msgspec.DecodeError as error:
        raise SharedError(f"the store holds a weight state that cannot be read: {error}") from error


async def write_state(words: SharedWords, state: FleetState) -> None:
    """Keep a state in place of the one before. Raises SharedError."""
    await words.write(_STATE, msgspec.json.encode(state).decode())
