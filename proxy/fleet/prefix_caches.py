"""Which replica holds the beginning of a prompt in its prefix cache, by the turns that it served.

The conversation of a request names its replica; without one, the text of its prompt does (`prefixes.py`).
"""

import time
from typing import TYPE_CHECKING

from proxy.fleet.prefixes import Prefixes
from proxy.fleet.replica import Replica
from proxy.fleet.routing import Routing

if TYPE_CHECKING:
    from proxy.fleet.fleet import Fleet


class PrefixCaches:
    """The prefix caches of one fleet."""

    def __init__(self, fleet: "Fleet") -> None:
        self._fleet = fleet
        self._prefixes = Prefixes()
        self._cleared_at: dict[str, float] = {}
        """When the cache of a replica was last cleared, by its name, in seconds since the epoch."""

    def holder(self, routing: Routing) -> str:
        """Name of the replica that holds the history of a request; empty if there is none."""
        active = self._fleet.conversations.holder(routing.conversation)
        if active or routing.held_since >= self._cleared_at.get(routing.holder, 0.0):
            return active or routing.holder
        return ""

    def holder_of_prompt(self, prompt: bytes) -> tuple[str, float]:
        """The least loaded replica with the longest beginning of a prompt, and its share of the prompt."""
        fleet = self._fleet
        if len(fleet.replicas) < 2:
            return "", 0.0
        holders, share = self._prefixes.find(prompt)
        usable = [
            replica.name for replica in fleet.replicas if replica.name in holders and fleet.in_use(replica)
        ]
        return min(usable, key=fleet.conversations.load, default=""), share

    def note(self, prompt: bytes, replica: Replica) -> None:
        """Take note that a replica holds a prompt in its cache."""
        if len(self._fleet.replicas) > 1:
            self._prefixes.put(prompt, replica.name)

    def forget(self, replica: Replica) -> None:
        """Take note that the cache of a replica was cleared."""
        self._cleared_at[replica.name] = time.time()
        self._prefixes.forget(replica.name)
        self._fleet.conversations.forget_caches(replica.name)
