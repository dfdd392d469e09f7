"""Passes all other routes through to the engine."""

from collections.abc import Mapping

from proxy.dialects.base import header
from proxy.fleet.routing import BYTES_PER_ID, Routing, body_digest
from proxy.history.store import session_id
from proxy.http import Request, Response
from proxy.routes.base import Route
from proxy.routes.credentials import unverified_tenant
from proxy.routes.paths import engine_path
from proxy.routes.scopes import KeyScope, scope_of_engine_route
from proxy.routes.session_names import HEADER as SESSION_HEADER
from proxy.turn.services import Services

_SAFE = ("GET", "HEAD")
_REPEATABLE = (
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/tokenize",
    "/detokenize",
)
"""POST routes that change nothing in the engine."""


class PassThrough(Route):
    """Responses, messages, embeddings, models, metrics, and all other routes of the engine."""

    path = "/{path:path}"
    methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
    inside_vllm = False
    needs_tenant = False
    catches_all = True

    def canonical_path(self, path: str, parameters: Mapping[str, str]) -> str:
        """See `Route.canonical_path`; `/models` is `/v1/models` here."""
        return engine_path(path)

    def needed_scope(self, method: str, path: str) -> KeyScope | None:
        """See `Route.needed_scope`."""
        return scope_of_engine_route(path.rstrip("/") or "/")

    async def answer(self, request: Request, services: Services, /) -> Response:
        """The engine's response."""
        path = request.path.partition("?")[0]
        repeatable = request.method in _SAFE or path in _REPEATABLE
        call = Request(request.method, request.path, request.headers, request.body, repeatable)
        routing = Routing(
            conversation=_session(request),
            ids=len(request.body) // BYTES_PER_ID,
            tenant=request.tenant or unverified_tenant(request.headers),
            repeatable=repeatable,
            digest=(lambda: body_digest(path, request.body)) if request.method not in _SAFE else None,
        )
        return await services.fleet.send_to_any(call, routing)


def _session(request: Request) -> str:
    """The key of the session that a request names; empty if it names none."""
    name = header(request.headers, SESSION_HEADER)
    return session_id(request.tenant, name.decode("latin-1")) if name else ""
