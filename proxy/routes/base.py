"""A route: a path, and a function from a request to a response."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from proxy.http import Request, Response
from proxy.routes.paths import fill, other_paths
from proxy.routes.scopes import KeyScope
from proxy.turn.services import Services


class Route(ABC):
    """One route. `routes.py` lists all of them."""

    path: ClassVar[str]
    """The route's canonical path, a template in Starlette's syntax."""
    methods: ClassVar[tuple[str, ...]] = ("POST",)
    inside_vllm: ClassVar[bool] = True
    """Whether it is mounted inside vLLM too; False if vLLM has its own route for it."""
    replaces_engine_route: ClassVar[bool] = False
    """Whether it is mounted inside vLLM only if vLLM serves its path, and observes vLLM's own route then."""
    needs_tenant: ClassVar[bool] = True
    """Whether the client's credential is verified first and `Request.tenant` is set."""
    key_scope: ClassVar[KeyScope | None] = KeyScope.INFERENCE
    """The scope that an API key of the proxy needs for it; None where no key is needed."""
    under_v1: ClassVar[bool] = False
    """Whether it is served under `/v1` too, although its canonical path is not."""
    store_seconds: ClassVar[float | None] = None
    """How long one request waits for the store, all its calls together; None for `store_timeout_s`."""
    catches_all: ClassVar[bool] = False
    observed: ClassVar[bool] = True
    """Whether its requests are timed, counted as in flight and logged; False for health checks and
    scrapes."""
    is_public: ClassVar[bool] = True
    """Whether the OpenAPI page shows it; False for what only the viewer's page reads."""
    summary: ClassVar[str] = ""
    openapi: ClassVar[dict[str, Any]] = {}
    """The route's description on the OpenAPI page."""

    @abstractmethod
    async def answer(self, incoming: Request, gateway: Services, /) -> Response:
        """Respond to a request.

        Raises:
            ApiError: becomes the error object that the client gets.
        """

    def needed_scope(self, method: str, path: str) -> KeyScope | None:
        """The scope that an API key needs for a request; `path` is its canonical path, decoded."""
        return self.key_scope

    @property
    def description(self) -> str:
        """The route's entry on the OpenAPI page."""
        return type(self).answer.__doc__ or ""

    @property
    def label(self) -> str:
        """The route's name in metrics: its path, which is a template."""
        return "other" if self.catches_all else self.path

    @property
    def aliases(self) -> list[str]:
        """The other path templates of the route."""
        return [] if self.catches_all else other_paths(self.path, under_v1=self.under_v1)

    def canonical_path(self, path: str, parameters: Mapping[str, str]) -> str:
        """The canonical path of a request.

        Args:
            path: as the client sent it, percent-encoded and without the query string.
            parameters: the values that the template matched in it.
        """
        return fill(self.path, parameters)
