"""Parses large bodies on a thread, because parsing would block the event loop."""

from collections.abc import Callable
from typing import TypeVar

from proxy.http import Request
from proxy.turn.services import Services

T = TypeVar("T")

_LARGE = 2**20
"""Number of bytes that take a millisecond to parse."""


async def parsed(request: Request, services: Services, parse: Callable[[], T]) -> T:
    """Parse a request with `parse`, on a thread if its body is large.

    Raises:
        Overloaded: the threads have too much to do already.
        ApiError: as `parse`.
    """
    if len(request.body) < _LARGE:
        return parse()
    return await services.encoders.run(parse, len(request.body))
