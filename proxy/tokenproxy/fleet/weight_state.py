"""The weights of a fleet: the state that all its processes share, and the versions that sample one turn.

Law: a replica serves requests only if its weights are those of the fleet.

    problem(replica) is empty  <=>  no failure of it is recorded, and
                                    no version was set, or its engine reports the version that was set

One word in the store holds the state. The process that gets an admin call writes it; all others read it.

A turn has the versions under which it is sampled:

    [("7", 0, 12), ("8", 12, 40)]     its first 12 ids were sampled with version 7, the others with 8
    [("7", 0, 40), ("8", 0, 40)]      uncertain: each id was sampled with one of them

The position of a change is known if the fleet was paused while the version changed and the stream was quiet:
an engine that is paused has sent all that it sampled before. It is never estimated.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from tokenproxy.base.errors import Unavailable

_STATE = "weights"
"""The name of the word that holds the state."""
Positions = Mapping[int, int]
"""Number of the sampled ids that arrived, by the index of the choice; a missing choice has none."""


class SharedError(Unavailable):
    """The store cannot be read or written; the message says why."""


class SharedWords(Protocol):
    """Words that the processes of a fleet share. All methods may raise SharedError."""

    shared: bool
    """Whether other processes may use the store."""

    async def read(self) -> Mapping[str, str]:
        """All words, by name."""
        ...

    async def write(self, name: str, word: str | None) -> None:
        """Keep a word in place of the one before; None forgets it."""
        ...

    async def wait(self, work: Awaitable[object]) -> None:
        """Wait for work of this process no longer than a request may wait for words."""
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
        if self.version in (None, version):
            return failure.reason if failure is not None else ""
        problems = [failure.reason] if failure is not None else []
        if version is None:
            problems.append(
                f"it reports no weight version, and that of the fleet is {self.version}: run it with "
                "VLLM_SERVER_DEV_MODE=1, and update its weights"
            )
        else:
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


def nothing_arrived() -> Positions:
    """The progress of a stream whose first event has not arrived."""
    return {}


def unknown() -> None:
    """The progress of a response that arrives as a whole."""


class WeightTag:
    """The versions under which one turn is sampled on one replica."""

    __slots__ = (
        "__weakref__", "_cuts", "_ended", "_pending", "_uncertain",
        "before", "progress", "replica", "version",
    )  # fmt: skip

    def __init__(
        self, version: str | None, replica: str = "", *, stream: bool, uncertain: bool = False
    ) -> None:
        """A turn that is about to be sent.

        Args:
            version: the version that the replica has now; None if it reports none.
            replica: its name.
            uncertain: whether the weights change at this moment.
        """
        self.version = version
        self.replica = replica
        self.progress: Callable[[], Positions | None] = nothing_arrived if stream else unknown
        """Returns what arrived until now; None if that is not known."""
        self.before: Positions | None = None
        """What had arrived when the positions of the streams were last noted during a pause."""
        self._uncertain = uncertain
        self._cuts: list[tuple[str, Positions | None]] = []
        self._ended = False
        self._pending: tuple[str, Positions | None] | None = None
        """The version with which the replica resumes, and what had arrived when it was set."""

    def end(self) -> None:
        """Nothing more is sampled under the tag: what changes from now on does not concern it."""
        self._ended = True

    def changing(self) -> None:
        """The weights change from now on while the turn may be sampled."""
        self._uncertain |= not self._ended

    def named(self, version: str, *, paused: bool) -> None:
        """The replica has another version from now on. While it is paused, it samples nothing."""
        if self._ended:
            return
        if paused:
            self._pending = (version, self.progress())
        elif version != self._latest:
            self._pending = None
            self._cuts.append((version, None))

    def resumed(self, positions: Positions | None) -> None:
        """The replica was resumed after a pause; `positions` is what had arrived then, None if unknown."""
        pending, self._pending = self._pending, None
        if pending is not None and pending[0] != self._latest:
            self._cuts.append((pending[0], positions))

    def spans(self, choice: int, ids: int) -> tuple[list[tuple[str, int, int]], bool]:
        """The versions of a choice that ended after `ids` sampled ids, and whether they are uncertain."""
        if self.version is None and not self._cuts and self._pending is None:
            return [], self._uncertain
        cuts = list(self._cuts)
        if self._pending is not None:
            version, arrived = self._pending
            if arrived is None or arrived.get(choice, 0) != ids:
                cuts.append((version, None))
        starts = [(self.version, 0)]
        exact = not self._uncertain and not (cuts and self.version is None)
        for version, positions in cuts:
            exact = exact and positions is not None
            starts.append((version, positions.get(choice, 0) if positions is not None else 0))
        if not exact:
            versions = dict.fromkeys(version for version, _ in starts if version is not None)
            return [(version, 0, ids) for version in versions], True
        ends = [*(start for _, start in starts[1:]), ids]
        return [
            (version, start, min(end, ids))
            for (version, start), end in zip(starts, ends, strict=True)
            if version is not None and start < min(end, ids)
        ], False

    @property
    def _latest(self) -> str | None:
        return self._cuts[-1][0] if self._cuts else self.version
