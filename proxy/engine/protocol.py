"""The protocol of an engine, whether it is reached over a socket or in the same process."""

from dataclasses import dataclass, replace
from typing import Protocol

from proxy.http import Request, Response


class Engine(Protocol):
    """One vLLM."""

    @property
    def name(self) -> str:
        """Its URL, or another name of it, for log and error messages."""
        ...

    async def send(self, request: Request) -> Response:
        """Send a request and wait for the head of the response.

        Raises:
            EngineUnavailable: nothing listens at its address; the request was not received.
            EngineBroken: the connection broke before a response arrived.
            EngineTimeout: connecting took too long.
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

    async def aclose(self) -> None:
        """Does nothing: the owner of the wrapped engine closes it."""
