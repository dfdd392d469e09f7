"""The canonical path of a request. A route has one, and clients write their base URLs differently:

/chat/completions   /v1/chat/completions/      /v1/chat/completions
/v1/tokenize        /tokenize/                 /tokenize
/sessions/ID/v1/ANYTHING                       /v1/ANYTHING, in the session
/sessions/ID/chat/completions                  the same without /v1, if it is in UNDER_V1 or AT_ROOT
/sessions/ID        /sessions/ID/reward        /v1/sessions/ID, /v1/sessions/ID/reward
"""

import re
from collections.abc import Iterable, Sequence
from urllib.parse import unquote

from starlette.routing import BaseRoute, Match

from tokenproxy.base.errors import ApiError, BadRequest, NotFound, send_error
from tokenproxy.base.types import ASGIApp, Receive, Scope, Send
from tokenproxy.web.parameters import HEADER, check_name

UNDER_V1 = frozenset(
    {"audio", "chat", "completions", "embeddings", "messages", "models", "responses", "samples", "sessions"}
)
"""First segments of routes that the proxy or vLLM serves under `/v1` only. `score` and `rerank` are not among
them: vLLM serves both without `/v1` as well, and its --api-key guards only the paths with `/v1`."""
AT_ROOT = frozenset({"tokenize", "detokenize", "generate", "chat"})
"""Paths that are served without `/v1` only. Clients whose base URL ends in `/v1` request them under `/v1`."""
OF_A_SESSION = frozenset({"", "end", "reward", "samples", "traces"})
"""What follows a session in the paths of its own routes."""

_ENCODED_SLASH = re.compile("%(2f|5c)", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def path_of(scope: Scope) -> str:
    """The decoded path of a request, without the application's root path."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def raw_path(scope: Scope) -> str:
    """The path as the client sent it, percent-encoded; without the application's root path."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    return path.removeprefix(scope.get("root_path", "").encode()).decode("latin-1")


def check_path(scope: Scope) -> None:
    """Refuse a path that the proxy and an engine, or a server between them, may read differently.

    Raises:
        BadRequest: it holds an encoded slash, a `.` or `..` segment or a control character, or is not a path.
    """
    raw = raw_path(scope)
    decoded = unquote(raw)
    if not raw.startswith("/"):
        problem = "must begin with a slash"
    elif _ENCODED_SLASH.search(raw) or "\\" in raw:
        problem = "must not hold an encoded slash (%2F) or a backslash"
    elif any(segment in (".", "..") for segment in decoded.split("/")):
        problem = "must not hold the segments . and .."
    elif _CONTROL.search(decoded):
        problem = "must not hold control characters"
    else:
        return
    raise BadRequest(f"the path of the URL {problem}", param="path", code="invalid_path")


class Paths:
    """Finds the canonical path of a client's path."""

    def __init__(self, fixed: Iterable[str]) -> None:
        """`fixed`: the paths of routes that hold no parameter."""
        self._fixed = frozenset(fixed)

    def canonical(self, path: str) -> tuple[str, str]:
        """The canonical path, and the session that the path names; empty if it names none.

        Args:
            path: percent-encoded, without the query. An unknown one is returned unchanged.

        Raises:
            BadRequest: what stands for a session's name is none.
            NotFound: no route follows the session's name.
        """
        if path in self._fixed:
            return path, ""
        segments = path.split("/")
        if segments[1:2] == ["sessions"] and len(segments) > 3:
            end = _end_of_name(segments)
            session, first = check_name(unquote("/".join(segments[2:end])), "session"), segments[end]
            if first not in OF_A_SESSION:
                if first != "v1" and first not in UNDER_V1 | AT_ROOT:
                    raise NotFound(
                        f"unknown route {unquote(path)}: the base URL of a session is /sessions/{session}/v1"
                    )
                rest = "/".join(segments[end:]).removeprefix("v1/")
                return self.canonical(f"/v1/{rest}")[0], session
            path = "/".join(["", "sessions", session, *segments[end:]])
        return self._outside_sessions(path), ""

    def _outside_sessions(self, path: str) -> str:
        bare = path.rstrip("/")
        if bare in self._fixed:
            return bare
        segments = bare.split("/")[1:]
        name = "/".join(segments[1:] if segments[:1] == ["v1"] else segments)
        if name in AT_ROOT:
            return f"/{name}"
        below = f"/v1/{name}"
        return below if below in self._fixed or name.partition("/")[0] in UNDER_V1 else path

    def of(self, scope: Scope) -> Scope:
        """The scope of a request with its canonical path, and with the session in a header.

        It is `scope` itself if the path is canonical. Raises BadRequest or NotFound, as `canonical`.
        """
        raw = raw_path(scope)
        path, session = self.canonical(raw)
        if path == raw:
            return scope
        root = scope.get("root_path", "")
        changed = {**scope, "path": root + unquote(path), "raw_path": (root + path).encode("latin-1")}
        if session:
            headers = [pair for pair in scope["headers"] if pair[0] != HEADER]
            changed["headers"] = [*headers, (HEADER, session.encode())]
        return changed


def _end_of_name(segments: Sequence[str]) -> int:
    """The index after the name of a session, which may hold slashes, in a path that begins with /sessions."""
    if segments[3] not in UNDER_V1 | AT_ROOT:
        if "v1" in segments[3:]:
            return segments.index("v1", 3)
        if segments[-1] in OF_A_SESSION - {""}:
            return len(segments) - 1
    return 3


class OtherPaths(BaseRoute):
    """Inside vLLM: sends a request whose path is not canonical through the whole application again.

    So all of vLLM's own checks of `/v1`, such as API keys, apply to the other paths too. It is the last
    route, because a path that vLLM serves itself is not changed.
    """

    path = "/sessions/{session}/{path:path}"
    """For code that reads the paths of routes."""
    _SET_BY_ROUTING = ("path_params", "endpoint", "route", "router")

    def __init__(self, app: ASGIApp, paths: Paths) -> None:
        self._app = app
        self._paths = paths

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """See `starlette.routing.BaseRoute.matches`."""
        if scope["type"] != "http":
            return Match.NONE, {}
        try:
            return (Match.NONE if self._paths.of(scope) is scope else Match.FULL), {}
        except ApiError:
            return Match.FULL, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `starlette.routing.BaseRoute.handle`."""
        try:
            check_path(scope)
            changed = self._paths.of(scope)
        except ApiError as error:
            await send_error(send, error, scope["path"])
            return
        inner = {key: value for key, value in changed.items() if key not in self._SET_BY_ROUTING}
        await self._app(inner, receive, send)
