"""Sends one call to many replicas at the same moment. Nothing is repeated.

Calls that meet in a rendezvous return only when every replica got its own: a loop that waits for one replica
before it sends to the next one would wait for ever.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from proxy.errors import ApiError
from proxy.fleet.replica import Replica
from proxy.http import Request
from proxy.types import Headers


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one replica answered."""

    replica: Replica
    status: int = 0
    """0 if there is no answer."""
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    problem: str = ""
    """Why there is no answer, or why it counts as a failure."""

    @property
    def ok(self) -> bool:
        """Whether the call succeeded on this replica."""
        return 200 <= self.status < 300 and not self.problem

    @property
    def refused(self) -> bool:
        """Whether the replica refused the request before it did anything."""
        return 400 <= self.status < 500

    def value(self, name: str) -> Any:
        """A field of the answer; None if the answer is no JSON object, or has no such field."""
        try:
            answer = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return answer.get(name) if isinstance(answer, dict) else None


async def fan_out(requests: Mapping[Replica, Request], timeout_s: float) -> list[Outcome]:
    """Send each replica its request; returns one outcome for each, in the same order. Never raises an error.

    Args:
        timeout_s: for each replica, until the end of its answer.
    """
    calls = [_send(replica, request, timeout_s) for replica, request in requests.items()]
    return list(await asyncio.gather(*calls))


async def _send(replica: Replica, request: Request, timeout_s: float) -> Outcome:
    try:
        async with asyncio.timeout(timeout_s):
            response = await replica.engine.send(request)
            try:
                body = await response.read()
            finally:
                await response.aclose()
    except TimeoutError:
        return Outcome(replica, problem=f"no answer within {timeout_s:g} s (`weight_update_timeout_s`)")
    except ApiError as error:
        return Outcome(replica, problem=error.message)
    return Outcome(replica, response.status, response.headers, body)
