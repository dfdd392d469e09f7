"""Which engines belong to the fleet: from settings, from a file, by a name, and from the admin API.

The fleet has what any of them names, except what the admin API removed. The store has one word for each
replica that the admin API changed; the newest word counts, from whichever process of the fleet it came. A
change touches only the replicas that come or go: requests that run on a removed one end normally, and its
conversations move when they continue.
"""

import asyncio
import hashlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from yarl import URL

from tokenproxy.base.urls import (
    DNS_SCHEME,
    UpstreamsError,
    names_engines,
    normalise_base_url,
    read_upstreams,
    without_credentials,
)
from tokenproxy.fleet.fleet import Fleet
from tokenproxy.fleet.replica import Replica
from tokenproxy.fleet.weight_state import SharedError, SharedWords

log = logging.getLogger("tokenproxy")

Resolve = Callable[[str], Awaitable[list[str]]]
"""From a URL whose scheme stands for a name to the URLs of its engines. Raises UpstreamsError."""


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


_ADDS = (ReplicaChange.ADDED, ReplicaChange.ADDED_DRAINED)
_DRAINS = (ReplicaChange.DRAINED, ReplicaChange.ADDED_DRAINED)


async def resolve_host(url: str) -> list[str]:
    """One URL for each address of the host of a `dns+http` URL, sorted.

    Raises:
        UpstreamsError: the name has no address, or is not a host.
    """
    if not url.startswith(f"{DNS_SCHEME}://"):
        raise UpstreamsError("Ray's actors are known in a proxy that Ray Serve runs: see docs/ray.md")
    parsed = URL(url.removeprefix("dns+"))
    try:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UpstreamsError(f"{parsed.host} cannot be resolved: {error.strerror}") from error
    # an engine with an IPv4 and an IPv6 address is one engine
    family = min(info[0] for info in found)
    addresses = sorted({str(address[0]) for kind, *_, address in found if kind == family})
    return [str(parsed.with_host(address)).rstrip("/") for address in addresses]


@dataclass(slots=True)
class Membership:
    """Keeps the replicas of a fleet as the sources name them. One per application."""

    fleet: Fleet
    make_replica: Callable[[str], Replica]
    shared: SharedWords
    """The changes by the admin API, by the names of the replicas: their URLs without credentials."""
    upstreams: Sequence[str] = ()
    """Base URLs; those with the scheme `dns+http` or `ray-actor` are resolved again and again."""
    file: Path | None = None
    """One URL in each line; what follows `#` is a comment."""
    resolve: Resolve = resolve_host
    changes: dict[str, ReplicaChange] = field(default_factory=dict)
    """Those that apply."""
    _writes: int = 0
    """Counts the changes by this process: what was read before one of them is too old to apply."""
    _from_file: list[str] = field(default_factory=list)
    _from_names: dict[str, list[str]] = field(default_factory=dict)
    _urls: dict[str, str] = field(default_factory=dict)
    """Those of the replicas in the fleet, by their names."""
    _problems: dict[str, str] = field(default_factory=dict)

    async def refresh(self) -> None:
        """Read the sources and add or remove what changed. What cannot be read stays as it was."""
        if self.file is not None:
            with self._reported(str(self.file)):
                self._from_file = await asyncio.to_thread(read_upstreams, self.file)
        names = [url for url in [*self.upstreams, *self._from_file] if names_engines(url)]
        self._from_names = {url: self._from_names.get(url, []) for url in names}
        for url in names:
            with self._reported(url):
                self._from_names[url] = await self.resolve(url)
        with self._reported("the admin API"):
            await self._read_changes()
        self._apply()

    async def add(self, url: str) -> bool:
        """Add an engine; True. One that is part of the fleet already is used again if it was drained.

        Raises:
            ValueError: `url` is not an http or https URL, or holds a user or password.
            SharedError: the store does not take the change: nothing is changed.
        """
        url = normalise_base_url(url)
        if without_credentials(url) != url:
            raise ValueError(
                "the URL of an added replica must not hold a user or password: set `upstream_api_key`"
            )
        # what another process changed a moment ago must not be lost
        await self._read_changes()
        await self._change(url, None if url in self._named() else ReplicaChange.ADDED)
        return True

    async def drain(self, url: str) -> bool:
        """Send no more requests to an engine; those that run end. False if it is not part of the fleet.

        Raises: as `add`.
        """
        return await self._change_member(url, ReplicaChange.DRAINED, ReplicaChange.ADDED_DRAINED)

    async def remove(self, url: str) -> bool:
        """Remove an engine; requests that run on it end. False if it is not part of the fleet.

        Raises: as `add`.
        """
        return await self._change_member(url, ReplicaChange.REMOVED, None)

    async def _change_member(self, url: str, named: ReplicaChange, added: ReplicaChange | None) -> bool:
        """Change an engine that a source names, or that only the admin API added; False for any other."""
        name = without_credentials(normalise_base_url(url))
        await self._read_changes()
        if name not in self._members():
            return False
        await self._change(name, named if name in self._named() else added)
        return True

    async def _change(self, name: str, change: ReplicaChange | None) -> None:
        await self.shared.write(name, change)
        self._writes += 1
        self.changes.pop(name, None)
        if change is not None:
            self.changes[name] = change
        self._apply()

    async def _read_changes(self) -> None:
        """Learn what other processes changed.

        Raises:
            SharedError: the store cannot be read, or holds a change that is not known here.
        """
        writes, words = self._writes, await self.shared.read()
        try:
            stored = {name: ReplicaChange(word) for name, word in words.items()}
        except ValueError as error:
            raise SharedError(f"this version does not know a change in the store: {error}") from error
        if writes != self._writes:
            return
        for name, change in stored.items():
            if self.changes.get(name) is not change:
                undo = "DELETE" if change is ReplicaChange.ADDED else "POST"
                log.info("%s is %s by the admin API: %s /admin/replicas undoes that", name, change, undo)
        self.changes = stored

    def _named(self) -> dict[str, str]:
        """The URLs of the engines that settings and file name, by the names of their replicas."""
        named = [url for url in [*self.upstreams, *self._from_file] if not names_engines(url)]
        resolved = [url for urls in self._from_names.values() for url in urls]
        return {without_credentials(url): url for url in [*named, *resolved]}

    def _members(self) -> dict[str, str]:
        """The URLs of all engines that belong to the fleet, by the names of their replicas."""
        members = self._named()
        for name, change in sorted(self.changes.items()):
            if change is ReplicaChange.REMOVED:
                members.pop(name, None)
            elif change in _ADDS:
                members.setdefault(name, name)
        return members

    def _apply(self) -> None:
        members = self._members()
        for replica in list(self.fleet.replicas):
            # another password in the URL makes another replica
            if members.get(replica.name) != self._urls.get(replica.name, replica.name):
                log.info("%s leaves the fleet", replica.name)
                self.fleet.remove(replica)
        present = {replica.name for replica in self.fleet.replicas}
        for name, url in members.items():
            if name not in present:
                log.info("%s joins the fleet", name)
                self.fleet.add(self.make_replica(url))
        self._urls = members
        for replica in self.fleet.replicas:
            draining = self.changes.get(replica.name) in _DRAINS
            if draining != replica.draining:
                effect = "gets no more requests: it is drained" if draining else "gets requests again"
                log.info("%s %s", replica.name, effect)
                replica.draining = draining
                self.fleet.settle_model()

    async def watch(self) -> None:
        """Read the sources again after the interval."""
        await asyncio.sleep(self.fleet.watch_interval_s)
        await self.refresh()

    @contextmanager
    def _reported(self, source: str) -> Iterator[None]:
        """Log what is wrong with a source when it starts and when it ends."""
        try:
            yield
        except (UpstreamsError, SharedError) as error:
            if self._problems.get(source) != str(error):
                log.error("the engines of %s stay as they were: %s", source, error)
            self._problems[source] = str(error)
        else:
            if self._problems.pop(source, None):
                log.info("%s can be read again", source)


def fleet_id(upstreams: Sequence[str], file: Path | None) -> str:
    """What processes with equal settings of engines have in common: 16 hexadecimal digits.

    Engines of one fleet must not get requests of another, whose model may differ, only because both use one
    store.
    """
    names = sorted({without_credentials(url) for url in upstreams})
    source = "\n".join([*names, str(file.absolute()) if file else ""])
    return hashlib.blake2b(source.encode(), digest_size=8).hexdigest()
