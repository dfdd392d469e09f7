"""A route: a path, and a function from a request to a response."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from proxy.http import Request, Response
from proxy.turn.services import Services


class Route(ABC):
    """One wire format."""

    path: ClassVar[str]
    """Route template in Starlette's syntax."""
    methods: ClassVar[tuple[str, ...]] = ("POST",)
    inside_vllm: ClassVar[bool] = True
    """Whether it is mounted inside vLLM too; False where vLLM's own route serves."""
    catches_all: ClassVar[bool] = False
    summary: ClassVar[str] = ""
    openapi: ClassVar[dict[str, Any]] = {}
    """What the OpenAPI page shows, beside path and methods."""

    @abstractmethod
    async def answer(self, incoming: Request, gateway: Services) -> Response:
        """Answer a request.

        Raises:
            ApiError: becomes the error object that the client gets.
        """

    @property
    def description(self) -> str:
        """What the OpenAPI page says of the route."""
        return type(self).answer.__doc__ or ""
