"""Every other route of the engine, passed through."""

from collections.abc import Mapping

from proxy.http import Request, Response
from proxy.routes.base import Route
from proxy.routes.paths import engine_path
from proxy.turn.services import Services

_REPEATABLE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/tokenize",
    "/detokenize",
)
"""POST routes that change nothing in the engine."""


class PassThrough(Route):
    """Completions, responses, messages, embeddings, models, metrics, and whatever else the engine serves."""

    path = "/{path:path}"
    methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
    inside_vllm = False
    needs_tenant = False
    catches_all = True

    def canonical_path(self, path: str, parameters: Mapping[str, str]) -> str:
        """See `Route.canonical_path`; `/models` is `/v1/models` here."""
        return engine_path(path)

    async def answer(self, request: Request, services: Services, /) -> Response:
        """The engine's response."""
        path = request.path.partition("?")[0]
        repeatable = request.method in ("GET", "HEAD") or path in _REPEATABLE
        return await services.fleet.send_to_any(
            Request(request.method, request.path, request.headers, request.body, repeatable)
        )
