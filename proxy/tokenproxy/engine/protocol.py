"""The protocol of an engine, whether it is reached over a socket or in the same process."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from tokenproxy.base.errors import EngineBroken
from tokenproxy.base.http import Request, Response

_TELLS_NOTHING = frozenset({429, 502, 503, 504})


class Engine(Protocol):
    """One vLLM."""

    @property
    def name(self) -> str:
        """The engine's URL, or another name for it, in log and error messages."""
        ...

    async def send(self, request: Request) -> Response:
        """Send a request and wait for the head of the response.

        Raises:
            EngineUnavailable: nothing listens at its address; the request was not received.
            EngineBroken: the connection broke before a response arrived.
            EngineTimeout: connecting took too long.
        """
        ...

    def verify(self, verify: Callable[[], Awaitable[None]] | None) -> None:
        """Set the callback before a request over a new connection; it raises to stop the request.

        An engine that was restarted may serve another model. An engine in the same process ignores it.
        """
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


@dataclass(frozen=True, slots=True)
class EngineWithCredential:
    """An engine to which the proxy's own requests are sent with a credential."""

    engine: Engine
    credential: tuple[bytes, bytes]
    """Header name and value."""

    @property
    def name(self) -> str:
        """The engine's name."""
        return self.engine.name

    async def send(self, request: Request) -> Response:
        """See `Engine.send`."""
        return await self.engine.send(replace(request, headers=[*request.headers, self.credential]))

    def verify(self, verify: Callable[[], Awaitable[None]] | None) -> None:
        """See `Engine.verify`."""
        self.engine.verify(verify)

    async def aclose(self) -> None:
        """Does nothing: the owner of the wrapped engine closes it."""


async def fetch(engine: Engine, request: Request) -> tuple[int, bytes]:
    """Send a request; returns the status and body of the response.

    Raises:
        ApiError: the engine does not respond.
    """
    response = await engine.send(request)
    try:
        return response.status, await response.read()
    finally:
        await response.aclose()


async def examine(engine: Engine, request: Request) -> tuple[int, bytes]:
    """Send a request that finds out what an engine supports; returns the status and body of the response.

    Raises:
        EngineBroken: the status does not tell it, for example because the engine is busy.
        ApiError: the engine does not respond.
    """
    status, body = await fetch(engine, request)
    if status in _TELLS_NOTHING:
        raise EngineBroken(f"{engine.name} returned status {status} for {request.path}; retrying later")
    return status, body


def error_text(body: bytes) -> str:
    """The message of an engine's error object; the body itself if it is none. At most 300 characters."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return body.decode("utf-8", "replace")[:300]
