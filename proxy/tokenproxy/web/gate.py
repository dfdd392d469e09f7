"""Checks every request before routing: its head, its path, its host name, and who its client is.

A client has a tenant and scopes: of one of the proxy's own API keys, or without keys of where it is. They are
put into the ASGI scope; `endpoint.py`, which determines the route, checks the scopes.
"""

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from starlette.routing import compile_path

from tokenproxy.base.errors import ApiError, BadRequest, Forbidden, HeadTooLarge, Unauthorized, send_error
from tokenproxy.base.types import ASGIApp, Headers, Receive, Scope, Send
from tokenproxy.record.session_keys import SessionKeys
from tokenproxy.web.base import Route
from tokenproxy.web.credentials import TENANT_KEY, key_in, tenant_of_key
from tokenproxy.web.keys import (
    EVERY_SCOPE,
    SCOPES_KEY,
    SESSION_KEY,
    WITHOUT_ADMIN,
    ApiKey,
    KeyFile,
    KeyScope,
)
from tokenproxy.web.parameters import HEADER, check_name
from tokenproxy.web.paths import Paths, check_path, path_of

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Paths for health checks and scrapers, which have no key and use the address of a container."""
HEALTH_PATHS = OPEN_PATHS - {"/metrics"}
"""Those that also respond under every name, without details: a check may use the name of a service."""
HEAD_LIMIT_BYTES = 64 * 2**10
"""Largest request line with headers."""
_ANY_METHOD = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
"""Methods of a route that the engine serves, because only the engine knows which of them it accepts."""
LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
_METRICS = "/metrics"
_OF_A_SESSION = frozenset({KeyScope.TURNS})
_PAGE_PATH = re.compile(r"/viewer/?|/viewer/static/[^/]*")
"""The page, which holds no recorded data and asks for a key: a browser sends none with its first request."""
_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip"})
"""Headers that another proxy adds to a request."""


class Gate:
    """Refuses requests that no route should get, and passes others to their endpoint by method and path.

    It responds to OPTIONS itself: browsers send it without a key, and an engine would respond to clients
    without one. What has no endpoint of a fixed path goes to the application: Starlette's router, FastAPI's
    dependency stack and their handling of exceptions take 80 us, which an endpoint of ours does not need.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: Iterable[Route],
        endpoints: Mapping[tuple[str, str], ASGIApp],
        clients: "ApiKeys | NoKeys",
        allowed_hosts: Sequence[str] = (),
        loopback: bool = False,
    ) -> None:
        """A gate to `app`.

        Args:
            endpoints: by method and canonical path.
            clients: determines tenant and scopes of a client.
            allowed_hosts: empty allows all; `*.example.com` all hosts below it.
            loopback: if there are none, allow names of this machine only. A web page whose own host name
                resolves to 127.0.0.1 has another name, and counts as the proxy's own page in its browser.
        """
        self._app = app
        self._endpoints = endpoints
        self._clients = clients
        self._loopback = loopback
        self._any_host = not allowed_hosts
        self._hosts = frozenset(host.lower() for host in allowed_hosts if not host.startswith("*."))
        self._domains = tuple(host[1:].lower() for host in allowed_hosts if host.startswith("*."))
        own = [route for route in routes if not route.catches_all]
        self._methods = [(compile_path(route.path)[0], route.methods) for route in own]
        fixed = frozenset(route.path for route in own if "{" not in route.path)
        self._raw_paths = frozenset(path.encode() for path in fixed)
        self._paths = Paths(fixed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            scope = self._checked(scope)
        except ApiError as error:
            await send_error(send, error, scope["path"])
            return
        if scope["method"] == "OPTIONS":
            headers = [(b"allow", ", ".join(self.allowed(path_of(scope))).encode())]
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        endpoint = None if scope.get("root_path") else self._endpoints.get((scope["method"], scope["path"]))
        await (endpoint or self._app)(scope, receive, send)

    def allowed(self, path: str) -> list[str]:
        """The methods of a canonical path."""
        methods = dict.fromkeys(
            method for regex, methods in self._methods if regex.match(path) for method in methods
        )
        return [*(methods or _ANY_METHOD), "OPTIONS"]

    def _checked(self, scope: Scope) -> Scope:
        """The scope with its canonical path, and tenant and scopes of the client. Raises ApiError."""
        size, hosts = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b"")), []
        for name, value in scope["headers"]:
            size += len(name) + len(value) + 4  # ": " and the line's end
            if name == b"host":
                hosts.append(value)
        if size > HEAD_LIMIT_BYTES:
            raise HeadTooLarge(f"the request line and headers are over the limit of {HEAD_LIMIT_BYTES} bytes")
        if scope.get("root_path") or scope.get("raw_path") not in self._raw_paths:
            check_path(scope)
            scope = self._paths.of(scope)
        if len(hosts) > 1:
            raise BadRequest("a request must have one Host header", param="host")
        host = host_name(hosts[0]) if hosts else ""
        is_local = self._loopback and (not hosts or is_loopback(host))
        if not self._any_host:
            expected = host in self._hosts or host.endswith(self._domains)
        else:
            expected = not self._loopback or (is_local and bool(hosts))
        if not expected:
            scope = self._limited(scope, host)
        return scope if scope["method"] == "OPTIONS" else self._clients.identify(scope, is_local)

    def _limited(self, scope: Scope, host: str) -> Scope:
        """The scope of a request under an unexpected name, which gets no details, or nothing: BadRequest.

        A web page cannot make its own address that of this machine, only its own name. So scrapers may use
        any address.
        """
        path = path_of(scope) if scope["method"] in ("GET", "HEAD") else ""
        if path in OPEN_PATHS and _is_address(host):
            return scope
        if path in HEALTH_PATHS:
            return {**scope, SCOPES_KEY: frozenset()}
        raise BadRequest(
            "this proxy is not served under the name in the Host header: add it to `allowed_hosts`",
            param="host",
            code="host_not_allowed",
        )


def host_name(value: bytes) -> str:
    """The host in a Host header, without its port: `::1` of `[::1]:8100`."""
    text = value.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Whether a host name or address is a loopback address."""
    if host in LOOPBACK_NAMES:
        return True
    return ipaddress.ip_address(host).is_loopback if _is_address(host) else host.lower() == "localhost"


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


class ApiKeys:
    """Accepts requests with one of the keys, and puts their tenant and scopes into the ASGI scope.

    The keys are the proxy's, not the engine's: headers with one are removed before the engine gets the
    request.
    """

    def __init__(
        self,
        keys: Sequence[str],
        admin_keys: Sequence[str] = (),
        file: KeyFile | None = None,
        metrics_need_key: bool = False,
        sessions: SessionKeys | None = None,
    ) -> None:
        """`metrics_need_key`: whether `/metrics` needs a key with the scope `read`."""
        self._file = file
        self._sessions = sessions
        self._plain: dict[str, ApiKey] = {}
        """By their tenants, which are digests: the time of a look-up reveals nothing about a key."""
        for scopes, group in ((WITHOUT_ADMIN, keys), (EVERY_SCOPE, admin_keys)):
            tenants = (tenant_of_key(key.encode()) for key in group)
            self._plain |= {tenant: ApiKey(tenant, scopes) for tenant in tenants}
        self._open = OPEN_PATHS - {_METRICS} if metrics_need_key else OPEN_PATHS

    def identify(self, scope: Scope, is_local: bool) -> Scope:
        """The scope of a request, with tenant and scopes of its key. Raises Unauthorized."""
        path = path_of(scope)
        is_open = scope["method"] in ("GET", "HEAD") and (
            path in self._open or _PAGE_PATH.fullmatch(path) is not None
        )
        try:
            key, headers = self._verify(scope["headers"])
        except ApiError:
            if not is_open:
                raise
            key = None
        granted = {KeyScope.READ} if is_open and path == _METRICS else set()
        if key is not None:
            if key.session is not None:
                headers = in_session(headers, key.session.session)
            client = {TENANT_KEY: key.tenant, SCOPES_KEY: key.scopes | granted, SESSION_KEY: key.session}
            return {**scope, "headers": headers, **client}
        if is_open:
            return {**scope, SCOPES_KEY: granted}
        raise Unauthorized(
            "send an API key of this proxy as `Authorization: Bearer KEY` or `X-API-Key: KEY`",
            code="invalid_api_key",
        )

    def _verify(self, headers: Headers) -> tuple[ApiKey | None, Headers]:
        """The tenant and scopes of the first header with one of the keys, and the headers without any key."""
        found: ApiKey | None = None
        kept: Headers = []
        for pair in headers:
            sent = key_in(*pair)
            key = self._find(sent) if sent else None
            if key is None:
                kept.append(pair)
            elif found is None:
                found = key
        return found, kept

    def _find(self, key: bytes) -> ApiKey | None:
        found = self._plain.get(tenant_of_key(key))
        if found is None and self._file is not None:
            found = self._file.find(key)
        if found is None and self._sessions is not None and (granted := self._sessions.read(key)):
            found = ApiKey(granted.tenant, _OF_A_SESSION, granted)
        return found


def in_session(headers: Headers, session: str) -> Headers:
    """The headers of a request with the key of a session, which they name.

    Raises:
        Forbidden: they, or the path, name another session.
        BadRequest: they name none that is valid.
    """
    named = [value.decode("latin-1").strip() for name, value in headers if name == HEADER]
    if any(check_name(name, "X-Session-ID") != session for name in named):
        raise Forbidden(
            f"this API key is for the session {session!r} alone: name that one, or none",
            param="X-Session-ID",
            code="wrong_session",
        )
    return [*(pair for pair in headers if pair[0] != HEADER), (HEADER, session.encode())]


class NoKeys:
    """Without keys, every program may use and read, and only programs on this machine may administrate.

    A program is on this machine if the proxy listens on a loopback address only, no other proxy forwarded the
    request, and no web page sent it: a page in a browser on this machine can reach loopback addresses too.
    """

    def __init__(self, cors_origins: Collection[str] = ()) -> None:
        self._origins = frozenset(origin.encode() for origin in cors_origins)

    def identify(self, scope: Scope, is_local: bool) -> Scope:
        """The scope of a request, with its scopes. Raises Forbidden, as `check_page`.

        Args:
            is_local: whether the proxy listens on a loopback address only, and the request named it.
        """
        sent = dict(scope["headers"])
        check_page(sent, self._origins)
        allowed_page = b"origin" not in sent or sent[b"origin"] in self._origins
        local = is_local and allowed_page and _FORWARDED.isdisjoint(sent)
        # what the gate gave to a request with an unexpected name stays
        scope.setdefault(SCOPES_KEY, EVERY_SCOPE if local else WITHOUT_ADMIN)
        return scope


def check_page(sent: Mapping[bytes, bytes], origins: Collection[bytes], *, links: bool = True) -> None:
    """Refuse a request that a web page sent, unless it is the proxy's own page. For clients without keys.

    Browsers let pages of other origins send some requests without asking the server first, and tell it where
    they come from.

    Args:
        sent: the headers of the request.
        origins: those whose pages may use the proxy; `*` is all.
        links: whether a link to the proxy may be followed. A frame in a page counts as a link.

    Raises:
        Forbidden: it is a page of another origin.
    """
    origin = sent.get(b"origin")
    if origin is None:
        foreign = sent.get(b"sec-fetch-site") in (b"cross-site", b"same-site")
        foreign = foreign and not (links and sent.get(b"sec-fetch-mode") == b"navigate")
    else:
        foreign = origin.partition(b"://")[2] != sent.get(b"host")
        foreign = foreign and origin not in origins and b"*" not in origins
    if foreign:
        raise Forbidden(
            f"a web page of {(origin or b'another origin').decode('latin-1')} sent this request: add its "
            "origin to `cors_origins`, or set `api_key`",
            code="origin_not_allowed",
        )
