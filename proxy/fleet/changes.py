"""Changes of a fleet by the admin API, which all processes that share a store apply.

The store has one word for each replica that differs from what the settings, the file and DNS name. The newest
word counts, from whichever process it came. A process reads them at each interval, so that it applies what
others changed; what it changes itself it applies at once. A change that the store does not take applies in
this process alone, and is written again at each interval, unless another process changed that replica
meanwhile.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from proxy.urls import without_credentials

log = logging.getLogger("tokenproxy")


class ReplicaChange(StrEnum):
    """How a replica differs from what the settings, the file and DNS name."""

    ADDED = "added"
    """It is in the fleet, also where nothing else names it."""
    REMOVED = "removed"
    """It is not in the fleet, also where something else names it."""
    DRAINED = "drained"
    """It gets no more requests, and stays in the fleet as long as something else names it."""
    ADDED_DRAINED = "added_drained"
    """It is in the fleet, also where nothing else names it, and gets no more requests."""

    @property
    def adds(self) -> bool:
        """Whether the replica is in the fleet by this change alone."""
        return self in (ReplicaChange.ADDED, ReplicaChange.ADDED_DRAINED)

    @property
    def drains(self) -> bool:
        """Whether the replica gets no more requests."""
        return self in (ReplicaChange.DRAINED, ReplicaChange.ADDED_DRAINED)


class ChangesError(Exception):
    """Changes cannot be read or written; the message says why."""


class ChangeStore(Protocol):
    """Where the processes of a fleet keep its changes. Both methods may raise ChangesError."""

    async def read(self) -> dict[str, ReplicaChange]:
        """All changes, by the names of the replicas: their URLs without credentials."""
        ...

    async def write(self, name: str, change: ReplicaChange | None) -> None:
        """Keep the change of a replica in place of the one before; None forgets it."""
        ...


class _Unshared(NamedTuple):
    """A change that the store did not take."""

    change: ReplicaChange | None
    replaces: ReplicaChange | None
    """What the store had before, as far as this process knows."""
    was_read: bool
    """Whether this process had ever read what the store had."""


class Changes:
    """The changes as this process knows them."""

    def __init__(self, store: ChangeStore) -> None:
        self._store = store
        self._current: dict[str, ReplicaChange] = {}
        self._unshared: dict[str, _Unshared] = {}
        self._version = 0
        """Counts the changes of this process: what was read before one of them is too old to apply."""
        self._was_read = False
        self._problem = ""
        """Why the store could not be read the last time."""

    @property
    def current(self) -> Mapping[str, ReplicaChange]:
        """The changes that apply, by the names of the replicas."""
        return self._current

    @property
    def unshared(self) -> list[str]:
        """The replicas whose last change other processes do not know yet."""
        return sorted(self._unshared)

    async def refresh(self) -> None:
        """Read the changes that other processes made. If that fails, everything stays as it was."""
        version = self._version
        try:
            stored = await self._store.read()
        except ChangesError as error:
            if not self._problem:
                log.error("the changes that other processes made to the fleet cannot be read: %s", error)
            self._problem = str(error)
            return
        if self._problem:
            log.info("the changes that other processes made to the fleet can be read again")
            self._problem = ""
        for name, unshared in list(self._unshared.items()):
            await self._share(name, unshared, stored)
        if version == self._version:
            self._adopt(stored)

    async def set(self, name: str, change: ReplicaChange | None) -> None:
        """Change a replica, here at once, and in the store if that takes it; None undoes all changes."""
        replaces, was_read = self._current.get(name), self._was_read
        if name in self._unshared:
            _, replaces, was_read = self._unshared[name]
        try:
            await self._store.write(name, change)
        except ChangesError as error:
            self._unshared[name] = _Unshared(change, replaces, was_read)
            log.error("%s: its change applies in this process only until the store takes it: %s", name, error)
        else:
            self._unshared.pop(name, None)
        self._version += 1
        _put(self._current, name, change)

    async def _share(self, name: str, unshared: _Unshared, stored: dict[str, ReplicaChange]) -> None:
        """Write a change that the store did not take before; `stored` is brought up to date."""
        if unshared.was_read and stored.get(name) not in (unshared.replaces, unshared.change):
            log.warning("%s was changed by another process meanwhile: that counts", name)
        else:
            try:
                await self._store.write(name, unshared.change)
            except ChangesError:
                _put(stored, name, unshared.change)
                return
            log.info("%s: other processes learn of its change now", name)
            _put(stored, name, unshared.change)
        if self._unshared.get(name) is unshared:
            del self._unshared[name]

    def _adopt(self, stored: dict[str, ReplicaChange]) -> None:
        for name, change in stored.items():
            if self._current.get(name) is not change:
                _log_learned(name, change)
        self._was_read = True
        self._current = stored


def _log_learned(name: str, change: ReplicaChange) -> None:
    """Log a change that another process made, or this one before it was restarted, and how to undo it."""
    if change is ReplicaChange.ADDED:
        log.info("%s was added by the admin API; DELETE /admin/replicas?url=%s removes it", name, name)
        return
    undo = f'POST /admin/replicas {{"url": "{name}"}}'
    verb = "drained" if change.drains else "removed"
    log.warning("%s gets no requests: the admin API %s it; %s undoes that", name, verb, undo)


def _put(changes: dict[str, ReplicaChange], name: str, change: ReplicaChange | None) -> None:
    if change is None:
        changes.pop(name, None)
    else:
        changes[name] = change


def fleet_id(upstreams: Sequence[str], file: Path | None) -> str:
    """What processes with equal settings of engines have in common: 16 hexadecimal digits.

    Engines of one fleet must not get requests of another, whose model may differ, only because both use one
    store.
    """
    names = sorted({without_credentials(url) for url in upstreams})
    source = "\n".join([*names, str(file.absolute()) if file else ""])
    return hashlib.blake2b(source.encode(), digest_size=8).hexdigest()
