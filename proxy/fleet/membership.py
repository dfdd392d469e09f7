"""Which engines belong to the fleet: from settings, from a file, by a name, and from the admin API.

The fleet has what any of them names, except what the admin API removed; `changes` shares what that changed
with the other processes of the fleet. A change touches only the replicas that come or go: requests that run
on a removed one end normally, and its conversations move when they continue.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from yarl import URL

from proxy.fleet.changes import Changes, ReplicaChange
from proxy.fleet.fleet import Fleet
from proxy.fleet.replica import Replica
from proxy.urls import (
    DNS_SCHEME,
    UpstreamsError,
    names_engines,
    normalise_base_url,
    read_upstreams,
    without_credentials,
)

log = logging.getLogger("tokenproxy")


@dataclass(slots=True)
class Membership:
    """Keeps the replicas of a fleet as the sources name them. One per application."""

    fleet: Fleet
    make_replica: Callable[[str], Replica]
    changes: Changes
    """By the admin API."""
    upstreams: Sequence[str] = ()
    """Base URLs; those with the scheme `dns+http` or `ray-actor` are resolved again and again."""
    file: Path | None = None
    """One URL in each line; what follows `#` is a comment."""
    interval_s: float = 5.0
    """Seconds between two looks at the file, at names and at the changes of other processes."""
    resolve: "Resolve" = field(default_factory=lambda: resolve_host)
    _from_file: list[str] = field(default_factory=list)
    _from_names: dict[str, list[str]] = field(default_factory=dict)
    _urls: dict[str, str] = field(default_factory=dict)
    """Those of the replicas in the fleet, by their names."""
    _problems: dict[str, str] = field(default_factory=dict)
    _task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read all sources once, then again and again. Call it inside a running event loop."""
        await self.refresh()
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stop looking at the sources."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

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
        if self._task is not None:
            self._apply()  # a store that stalls must not hold up the sources
        await self.changes.refresh()
        self._apply()

    async def add(self, url: str) -> None:
        """Add an engine. One that is part of the fleet already is used again if it was drained.

        Raises:
            ValueError: `url` is not an http or https URL, or holds a user or password.
        """
        url = normalise_base_url(url)
        if without_credentials(url) != url:
            raise ValueError(
                "the URL of an added replica must not hold a user or password: set `upstream_api_key`"
            )
        # what another process changed a moment ago must not be lost
        await self.changes.refresh()
        await self._change(url, None if url in self._named() else ReplicaChange.ADDED)

    async def drain(self, url: str) -> bool:
        """Send no more requests to an engine; those that run end. False if it is not part of the fleet."""
        name = without_credentials(normalise_base_url(url))
        await self.changes.refresh()
        if name not in self._members():
            return False
        named = name in self._named()
        await self._change(name, ReplicaChange.DRAINED if named else ReplicaChange.ADDED_DRAINED)
        return True

    async def remove(self, url: str) -> bool:
        """Remove an engine; requests that run on it end. False if it is not part of the fleet."""
        name = without_credentials(normalise_base_url(url))
        await self.changes.refresh()
        if name not in self._members():
            return False
        await self._change(name, ReplicaChange.REMOVED if name in self._named() else None)
        return True

    def _named(self) -> dict[str, str]:
        """The URLs of the engines that settings and file name, by the names of their replicas."""
        named = [url for url in [*self.upstreams, *self._from_file] if not names_engines(url)]
        resolved = [url for urls in self._from_names.values() for url in urls]
        return {without_credentials(url): url for url in [*named, *resolved]}

    def _members(self) -> dict[str, str]:
        """The URLs of all engines that belong to the fleet, by the names of their replicas."""
        members = self._named()
        for name, change in sorted(self.changes.current.items()):
            if change is ReplicaChange.REMOVED:
                members.pop(name, None)
            elif change.adds:
                members.setdefault(name, name)
        return members

    async def _change(self, name: str, change: ReplicaChange | None) -> None:
        await self.changes.set(name, change)
        self._apply()

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
        self._apply_drains()

    def _apply_drains(self) -> None:
        for replica in self.fleet.replicas:
            change = self.changes.current.get(replica.name)
            draining = change is not None and change.drains
            if draining != replica.draining:
                log.info(
                    "%s %s",
                    replica.name,
                    "gets no more requests: it is drained" if draining else "gets requests again",
                )
                replica.draining = draining
                self.fleet.settle_model()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.interval_s)
            try:
                await self.refresh()
            except Exception:  # the boundary of the task: the fleet stays as it is
                log.exception("the list of engines could not be brought up to date")

    def _reported(self, source: str) -> "contextlib.AbstractContextManager[None]":
        return _Reported(self._problems, source)


class _Reported(contextlib.AbstractContextManager[None]):
    """Logs what is wrong with a source when it starts and when it ends."""

    def __init__(self, problems: dict[str, str], source: str) -> None:
        self._problems = problems
        self._source = source

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None:
            if self._problems.pop(self._source, None):
                log.info("%s can be read again", self._source)
            return False
        if not isinstance(error, UpstreamsError):
            return False
        if self._problems.get(self._source) != str(error):
            log.error("the engines of %s stay as they were: %s", self._source, error)
        self._problems[self._source] = str(error)
        return True


Resolve = Callable[[str], Awaitable[list[str]]]
"""From a URL whose scheme stands for a name to the URLs of its engines. Raises UpstreamsError."""


async def resolve_host(url: str) -> list[str]:
    """One URL for each address of the host of a `dns+http` URL, sorted.

    Raises:
        UpstreamsError: the name has no address, or is not a host.
    """
    if not url.startswith(f"{DNS_SCHEME}://"):
        raise UpstreamsError("Ray's actors are known in a proxy that Ray Serve runs: see docs/ray.md")
    parsed = URL("http" + url[len(DNS_SCHEME) :])
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            parsed.host, parsed.port, type=socket.SOCK_STREAM
        )
    except OSError as error:
        raise UpstreamsError(f"{parsed.host} cannot be resolved: {error.strerror}") from error
    # an engine with an IPv4 and an IPv6 address is one engine
    family = min(info[0] for info in found)
    addresses = sorted({str(address[0]) for kind, *_, address in found if kind == family})
    return [str(parsed.with_host(address)).rstrip("/") for address in addresses]
