"""`/sessions/{id}/v1/...`: any route, in a session that the client's base URL names.

For clients that cannot set headers. The part after the session's name selects the route:

    /sessions/ID/v1/ANYTHING          the route /v1/ANYTHING, in the session
    /sessions/ID/chat/completions     the same without /v1, for the first segments in WITHOUT_V1
    /sessions/ID[/samples|/traces|/reward|/end]   the session itself: an alias of /v1/sessions/ID...

WITHOUT_V1 holds no segment that can follow a session in an alias, so no path is ambiguous.
"""

from urllib.parse import quote, unquote

from fastapi import Request, Response
from fastapi.routing import APIRoute

from proxy.errors import ApiError, NotFound
from proxy.routes.endpoint import EndpointRoute, check_path, raw_path
from proxy.routes.paths import AT_ROOT, UNDER_V1
from proxy.routes.sending import send_error
from proxy.routes.session_names import HEADER, check_name
from proxy.types import ASGIApp, Receive, Scope, Send

WITHOUT_V1 = UNDER_V1 | AT_ROOT
"""First segments of routes that work without `/v1` after the session's name."""

_PATH = "/sessions/{session}/{path:path}"
_SET_BY_ROUTING = ("path_params", "endpoint", "route", "router")
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


class _Rerouted(Response):
    """Sends a request through the whole application again, with its session in a header.

    So all checks of `/v1`, such as API keys, apply to this path too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        parameters = scope["path_params"]
        try:
            check_path(scope)
            session = check_name(parameters["session"], "session")
            path, raw = _inner_path(session, parameters["path"], raw_path(scope))
        except ApiError as error:
            await send_error(send, error, scope["path"])
            return
        root = scope.get("root_path", "")
        inner = {key: value for key, value in scope.items() if key not in _SET_BY_ROUTING}
        inner["path"] = root + path
        inner["raw_path"] = (root + raw).encode("latin-1")
        headers = [pair for pair in scope["headers"] if pair[0] != HEADER]
        inner["headers"] = [*headers, (HEADER, session.encode())]
        await self._app(inner, receive, send)


def _inner_path(session: str, path: str, raw: str) -> tuple[str, str]:
    """The path without the session, decoded and percent-encoded.

    Raises:
        NotFound: there is no such route.
    """
    if not path.startswith("v1/"):
        if path.partition("/")[0] not in WITHOUT_V1:
            raise NotFound(
                f"unknown route /sessions/{session}/{path}: the base URL of a session is "
                f"/sessions/{session}/v1"
            )
        path = f"v1/{path}"
    rest = path.removeprefix("v1/")
    # `/sessions/ID/v1/a%2Fb`: the client's own encoding of what follows the session, if the slashes before it
    # are where the decoded path has them
    tail = "/".join(raw.split("/")[3:]).removeprefix("v1/")
    encoded = tail if unquote(tail) == rest else quote(rest)
    return f"/v1/{rest}", f"/v1/{encoded}"


def session_prefix(app: ASGIApp) -> APIRoute:
    """Removes the session from the path and serves the rest."""
    rerouted = _Rerouted(app)

    async def endpoint(request: Request) -> Response:
        return rerouted

    return EndpointRoute(
        _PATH,
        endpoint,
        methods=_METHODS,
        name="SessionPrefix",
        include_in_schema=False,
        response_model=None,
    )
