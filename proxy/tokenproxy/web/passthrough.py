"""Passes all other routes through to the engine."""

from urllib.parse import unquote

from tokenproxy.base.errors import BadRequest, Forbidden
from tokenproxy.base.fields import join, parse
from tokenproxy.base.http import Request, Response
from tokenproxy.fleet.choosing import BYTES_PER_ID, Routing, request_digest
from tokenproxy.record.store import session_id
from tokenproxy.turn.services import Services
from tokenproxy.web.admin import named_replica
from tokenproxy.web.base import Route, parse_bounded
from tokenproxy.web.credentials import unverified_tenant
from tokenproxy.web.keys import KeyScope, samples_unrecorded, scope_of_engine_route
from tokenproxy.web.parameters import session_name

_SAFE = ("GET", "HEAD")
_REPEATABLE = (
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
)
"""POST routes that change nothing in the engine."""
_PREPARES = (
    "/tokenize",
    "/detokenize",
    "/v1/chat/completions/render",
    "/v1/chat/completions/derender",
    "/v1/completions/render",
)
"""POST routes that do not use the engine's weights."""


class PassThrough(Route):
    """Embeddings, models, metrics, and all other routes of the engine."""

    path = "/{path:path}"
    methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
    inside_vllm = False
    needs_tenant = False
    catches_all = True

    def needed_scope(self, method: str, path: str) -> KeyScope | None:
        """See `Route.needed_scope`."""
        return scope_of_engine_route(path.rstrip("/") or "/")

    async def answer(self, request: Request, services: Services, /) -> Response:
        """The engine's response."""
        path = unquote(request.path.partition("?")[0])
        scope = self.needed_scope(request.method, path)
        if scope is KeyScope.ADMIN and (name := named_replica(request)):
            return await services.fleet.named(name).engine.send(request)
        inference = scope is KeyScope.INFERENCE and request.method == "POST"
        if inference and services.settings.asks_for_keys and samples_unrecorded(path.rstrip("/")):
            raise Forbidden(
                f"{path} would sample without a record, and past the limits and the policy of a session: use "
                "/v1/chat/completions, or another route of a turn",
                code="route_not_recorded",
            )
        repeatable = request.method in _SAFE or path in _REPEATABLE
        body = request.body
        if services.model_aliases and inference:
            body = await _with_served_model(request, services)
        call = Request(request.method, request.path, request.headers, body, repeatable)
        session, tenant = _session(request, services), request.tenant or unverified_tenant(request.headers)
        routing = Routing(
            conversation=session,
            ids=len(request.body) // BYTES_PER_ID,
            tenant=tenant,
            samples=inference and path not in _PREPARES,
            repeatable=repeatable,
            digest=None
            if request.method in _SAFE
            else (lambda: request_digest(path, request.body, session or tenant)),
        )
        return await services.fleet.send_to_any(call, routing)


async def _with_served_model(request: Request, services: Services) -> bytes:
    """The body, with the model that serves the request (`model_aliases`). Raises ApiError."""
    try:
        fields = await parse_bounded(request, services, lambda: parse(request.body))
        mapped = await services.model_aliases.map_fields(fields, services.fleet)
    except BadRequest:
        return request.body  # the engine explains what is wrong
    return join(fields) if mapped else request.body


def _session(request: Request, services: Services) -> str:
    """The key of the session that a request names; empty if it names none, or none that is valid."""
    try:
        name = session_name(request, from_key=services.settings.session_from_key)
    except BadRequest:
        return ""  # the engine's routes know no sessions
    return session_id(request.tenant, name) if name else ""
