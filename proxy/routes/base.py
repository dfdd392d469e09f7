"""A route: a path, and a function from a request to a response."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from proxy.http import Request, Response
from proxy.routes.paths import fill, other_paths
from proxy.turn.services import Services


class Route(ABC):
    """One route. `routes.py` lists all of them."""

    path: ClassVar[str]
    """Its canonical path, a template in Starlette's syntax."""
    methods: ClassVar[tuple[str, ...]] = ("POST",)
    inside_vllm: ClassVar[bool] = True
    """Whether it is mounted inside vLLM too; False where vLLM's own route serves."""
    needs_tenant: ClassVar[bool] = True
    """Whether the caller's credential is verified first, and `Request.tenant` set."""
    under_v1: ClassVar[bool] = False
    """Whether it is served under `/v1` too, although its canonical path is not."""
    catches_all: ClassVar[bool] = False
    summary: ClassVar[str] = ""
    openapi: ClassVar[dict[str, Any]] = {}
    """What the OpenAPI page shows, next to path and methods."""

    @abstractmethod
    async def answer(self, incoming: Request, gateway: Services, /) -> Response:
        """Respond to a request.

        Raises:
            ApiError: becomes the error object that the client gets.
        """

    @property
    def description(self) -> str:
        """What the OpenAPI page says of the route."""
        return type(self).answer.__doc__ or ""

    @property
    def aliases(self) -> list[str]:
        """The other path templates it is served at."""
        return [] if self.catches_all else other_paths(self.path, under_v1=self.under_v1)

    def canonical_path(self, path: str, parameters: Mapping[str, str]) -> str:
        """The canonical path of a request.

        Args:
            path: as the client sent it, percent-encoded and without the query string.
            parameters: what its template found in it.
        """
        return fill(self.path, parameters)
