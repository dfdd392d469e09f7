"""The list of all routes. A new route is a class in this folder and a line here."""

import re
from collections.abc import Callable, Collection

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Match

from tokenproxy.base.types import ASGIApp, Scope
from tokenproxy.fleet.admin_calls import ADMIN_CALLS
from tokenproxy.formats.chat import ChatFormat, TokensFormat
from tokenproxy.formats.messages.format import MessagesFormat
from tokenproxy.formats.prompts import CompletionsFormat, GenerateFormat
from tokenproxy.monitoring.exchange import Monitor, Observer
from tokenproxy.turn.services import Services
from tokenproxy.web import admin, feed, sessions, turns, viewer
from tokenproxy.web.base import Route
from tokenproxy.web.credentials import TenantOf
from tokenproxy.web.endpoint import Endpoint
from tokenproxy.web.passthrough import PassThrough
from tokenproxy.web.paths import OtherPaths, Paths
from tokenproxy.web.tokenize import CountTokens, Tokenize


def all_routes() -> list[Route]:
    """An instance of each route; the catch-all route comes last."""
    return [
        turns.TurnRoute(ChatFormat()),
        turns.TurnRoute(TokensFormat()),
        turns.TurnRoute(CompletionsFormat()),
        turns.TurnRoute(GenerateFormat()),
        turns.MessagesRoute(MessagesFormat()),
        CountTokens(),
        turns.Responses(),
        turns.CompactResponses(),
        turns.OneResponse(),
        Tokenize(),
        sessions.Sessions(),
        sessions.OneSession(),
        sessions.SessionSamples(),
        sessions.SessionTraces(),
        sessions.SessionReward(),
        sessions.SessionEnd(),
        sessions.FinishSession(),
        feed.FeedSamples(),
        feed.FeedAcknowledge(),
        feed.FeedConsumers(),
        feed.OneFeedConsumer(),
        viewer.ViewerPage(),
        viewer.ViewerSlash(),
        viewer.ViewerFile(),
        viewer.ViewerSessions(),
        viewer.ViewerSession(),
        viewer.ViewerTokens(),
        viewer.ViewerDrift(),
        admin.Replicas(),
        admin.Drain(),
        admin.Flush(),
        admin.Root(),
        admin.Health(),
        admin.Ready(),
        admin.MetricsPage(),
        *map(admin.EngineAdmin, ADMIN_CALLS),
        turns.TrlBatch("/generate", "prompts"),
        turns.TrlBatch("/chat", "messages"),
        PassThrough(),
    ]


def mount(
    app: FastAPI,
    services: Callable[[Scope], Services],
    tenant_of: TenantOf,
    observer: Observer,
    *,
    inside_vllm: bool,
    disabled: Collection[str] = (),
) -> dict[tuple[str, str], ASGIApp]:
    """Add the routes to `app`. Where two match a request, the one added first serves it.

    Returns the endpoints of fixed paths, by method and path.

    Args:
        services: returns the services of a request; called for each request.
        tenant_of: returns the tenant of a request; called for each request to a route that needs it.
        observer: inside vLLM, gets a report of each request to one of these routes.
        inside_vllm: whether `app` is vLLM's own, which serves the other routes itself.
        disabled: canonical paths of routes that are not added.
    """
    existing = list(app.router.routes)
    fixed: dict[tuple[str, str], ASGIApp] = {}
    for route in all_routes():
        if route.path in disabled or (inside_vllm and not route.inside_vllm):
            continue
        if inside_vllm and route.replaces_engine_route:
            scope = {"type": "http", "method": route.methods[0], "path": route.path, "root_path": ""}
            if not any(own.matches(scope)[0] is Match.FULL for own in existing):
                continue
        endpoint: ASGIApp = Endpoint(route, services, tenant_of, inside_vllm=inside_vllm)
        if inside_vllm:  # in front of vLLM, the application's first middleware observes every request
            endpoint = Monitor(endpoint, observer)
        for method in route.methods:
            app.router.routes.append(_api_route(route, method, endpoint))
            if "{" not in route.path:
                fixed.setdefault((method, route.path), endpoint)
    if inside_vllm:
        app.router.routes.append(OtherPaths(app, Paths({path for _, path in fixed})))
    return fixed


def _api_route(route: Route, method: str, endpoint: ASGIApp) -> APIRoute:
    """A FastAPI route that leaves the request to its endpoint: no parsing, no validation, no copies."""

    async def described() -> None:
        """What FastAPI's OpenAPI page examines."""

    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)", route.path)
    ]
    added = APIRoute(
        route.path,
        described,
        methods=[method],
        name=type(route).__name__,
        summary=route.summary or None,
        description=route.description,
        openapi_extra={"parameters": parameters, **route.openapi},
        include_in_schema=route.is_public and not route.catches_all and method != "HEAD",
        response_model=None,
    )
    added.app = endpoint
    return added
