"""The place of a request on a replica."""

from dataclasses import dataclass

from proxy.fleet.load import Lease
from proxy.fleet.replica import Replica


@dataclass(slots=True)
class Place:
    """A place on a replica, and the replicas that may get the request if that one fails."""

    replica: Replica
    lease: Lease
    others: list[Replica]


def give_back(place: Place) -> None:
    """Free a place that no request uses."""
    end_lease(place.replica, place.lease)


def end_lease(replica: Replica, lease: Lease) -> None:
    """Count a request as no longer running on a replica."""
    replica.load.end(lease)
    replica.breaker.ended(lease)
