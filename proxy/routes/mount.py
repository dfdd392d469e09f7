"""Put the routes on an application."""

from collections.abc import Callable, Collection, Sequence

from fastapi import FastAPI
from starlette.routing import BaseRoute, Match

from proxy.monitoring.middleware import Observer
from proxy.routes.base import Route
from proxy.routes.credentials import TenantOf
from proxy.routes.endpoint import Endpoint, alias_routes, endpoint_routes
from proxy.routes.paths import fill
from proxy.routes.routes import all_routes
from proxy.routes.session_prefix import session_prefix
from proxy.turn.services import Services
from proxy.types import Scope


def mount(
    app: FastAPI,
    services: Callable[[Scope], Services],
    tenant_of: TenantOf,
    observer: Observer,
    *,
    inside_vllm: bool,
    disabled: Collection[str] = (),
) -> dict[tuple[str, str], Endpoint]:
    """Add the routes to `app`, then their aliases. Where two match a request, the one added first serves it.

    Returns the endpoints of fixed paths, by method and path.

    Args:
        services: returns the services of a request; called for each request.
        tenant_of: returns the tenant of a request; called for each request to a route that needs it.
        observer: gets a report of each request.
        inside_vllm: whether `app` is vLLM's own, which serves the other routes itself.
        disabled: canonical paths of routes that are not added.
    """
    existing = list(app.router.routes)
    mounted = [route for route in all_routes() if route.path not in disabled]
    if inside_vllm:
        mounted = [route for route in mounted if _belongs_inside_vllm(route, existing)]
    # vLLM's middleware sets no scopes; its own flags enable or disable its routes
    endpoints = [
        Endpoint(route, services, tenant_of, observer, checks_scopes=not inside_vllm) for route in mounted
    ]
    for endpoint in endpoints:
        if not endpoint.route.catches_all:
            app.router.routes.extend(endpoint_routes(endpoint))
    for endpoint in endpoints:
        free = [path for path in endpoint.route.aliases if not _serves(existing, endpoint.route, path)]
        app.router.routes.extend(alias_routes(endpoint, free))
    app.router.routes.append(session_prefix(app))
    for endpoint in endpoints:
        if endpoint.route.catches_all:
            app.router.routes.extend(endpoint_routes(endpoint))
    return {
        (method, path): endpoint
        for endpoint in reversed(endpoints)  # of two with one path, the first serves it
        for path in (endpoint.route.path, *endpoint.route.aliases)
        for method in endpoint.route.methods
        if "{" not in path
    }


def _belongs_inside_vllm(route: Route, existing: Sequence[BaseRoute]) -> bool:
    """Whether vLLM's own application gets a route, next to those that it has."""
    if route.replaces_engine_route and not _serves(existing, route, route.path):
        return False
    return route.inside_vllm


def _serves(existing: Sequence[BaseRoute], route: Route, template: str) -> bool:
    """Whether the application's own routes serve an alias already: a plugin must not replace them."""
    path = fill(template, {"session": "any", "consumer": "any", "response_id": "any", "file": "any"})
    scopes = [{"type": "http", "method": method, "path": path, "root_path": ""} for method in route.methods]
    return any(own.matches(scope)[0] is Match.FULL for own in existing for scope in scopes)
