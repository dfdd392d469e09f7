"""`/sessions/{id}/v1/...`: any route with the session in its base URL, for clients that can set no header."""

from fastapi import Request, Response
from fastapi.routing import APIRoute

from proxy.errors import ApiError
from proxy.routes.endpoint import EndpointRoute, send_error
from proxy.turn.session_fields import HEADER, check_name
from proxy.types import ASGIApp, Receive, Scope, Send

_PATH = "/sessions/{session}/v1/{path:path}"
_OF_THIS_ROUTE = ("path_params", "endpoint", "route", "router")
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


class _Rerouted(Response):
    """The same request for the application itself, with its session in a header.

    It goes through the whole application again, so what guards `/v1` (an API key) guards this path too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        parameters = scope["path_params"]
        try:
            name = check_name(parameters["session"], "session")
        except ApiError as error:
            await send_error(send, error)
            return
        root = scope.get("root_path", "")
        raw = (scope.get("raw_path") or scope["path"].encode()).removeprefix(root.encode())
        headers = [pair for pair in scope["headers"] if pair[0] != HEADER]
        inner = {key: value for key, value in scope.items() if key not in _OF_THIS_ROUTE}
        inner["path"] = f"{root}/v1/{parameters['path']}"
        inner["raw_path"] = root.encode() + b"/v1/" + raw.split(b"/", 4)[4]
        inner["headers"] = [*headers, (HEADER, name.encode())]
        await self._app(inner, receive, send)


def session_prefix(app: ASGIApp) -> APIRoute:
    """The route that takes the session out of the path."""
    serving = _Rerouted(app)

    async def endpoint(request: Request) -> Response:
        return serving

    return EndpointRoute(
        _PATH,
        endpoint,
        methods=_METHODS,
        name="SessionPrefix",
        include_in_schema=False,
        response_model=None,
    )
