"""Put every wire format on an application."""

from collections.abc import Callable

from fastapi import FastAPI

from proxy.routes.all_routes import all_routes
from proxy.routes.endpoint import endpoint_routes
from proxy.routes.session_prefix import session_prefix
from proxy.turn.services import Services
from proxy.types import Scope


def mount(app: FastAPI, gateway: Callable[[Scope], Services], *, inside_vllm: bool) -> None:
    """Add the routes to `app`; where paths are equal, those added first win.

    Args:
        gateway: what serves a request; asked anew for each.
        inside_vllm: whether `app` is vLLM's own, which has routes for the rest.
    """
    app.router.routes.append(session_prefix(app))
    for dialect in all_routes():
        if dialect.inside_vllm or not inside_vllm:
            app.router.routes.extend(endpoint_routes(dialect, gateway))
