"""The protocol of an engine, whether it is reached over a socket or in the same process."""

from typing import Protocol

from proxy.http import Request, Response


class Engine(Protocol):
    """One vLLM."""

    name: str

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
