"""The protocol of an engine, whether it is reached over a socket or in the same process."""

from dataclasses import dataclass, replace
from typing import Protocol

from proxy.http import Request, Response


class Engine(Protocol):
    """One vLLM."""

    @property
    def name(self) -> str:
        """Its URL, or a word for it: for logs and errors."""
        ...

    async def send(self, request: Request) -> Response:
        """Send a request and wait for the head of the response.

        Raises:
            EngineUnavailable: nothing listens there; the request was not received.
            EngineBroken: the connection broke before a response came.
            EngineTimeout: connecting took too long.
        """
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


@dataclass(frozen=True, slots=True)
class EngineWithCredential:
    """An engine that gets a credential with the proxy's own questions."""

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
        """Nothing is held here: the engine belongs to whoever made it."""
