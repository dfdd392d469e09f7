"""Authentication with the proxy's own API keys, or without keys: plain ASGI middlewares after the gate.

They identify the client, and put its tenant and scopes into the ASGI scope. `endpoint.py`, which
determines the route, checks the scopes.
"""

import re
import secrets
from collections.abc import Collection, Mapping, Sequence

from tokenproxy.base.errors import Forbidden, Unauthorized
from tokenproxy.base.types import ASGIApp, Headers, Receive, Scope, Send
from tokenproxy.web.credentials import SCOPE_KEY, key_in, tenant_of_key
from tokenproxy.web.gate import OPEN_PATHS, host_name, is_loopback, path_of
from tokenproxy.web.keys import EVERY_SCOPE, SCOPES_KEY, WITHOUT_ADMIN, ApiKey, KeyFile, KeyScope

_METRICS = "/metrics"
_PAGE_PATH = re.compile(r"/viewer/?|/viewer/static/[^/]*")
"""The page, which holds no recorded data and asks for a key: a browser sends none with its first request."""
_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip"})
"""Headers that another proxy adds to a request."""


class ApiKeys:
    """Accepts requests with one of the keys, and puts their tenant and scopes into the ASGI scope.

    The keys are the proxy's, not the engine's: headers with one are removed before the engine gets the
    request.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        admin_keys: Sequence[str] = (),
        file: KeyFile | None = None,
        metrics_need_key: bool = False,
    ) -> None:
        """`metrics_need_key`: whether `/metrics` needs a key with the scope `read`."""
        self._app = app
        self._file = file
        self._plain: list[ApiKey] = []
        for scopes, group in ((EVERY_SCOPE, admin_keys), (WITHOUT_ADMIN, keys)):
            self._plain += [ApiKey(tenant_of_key(key.encode()), scopes) for key in group]
        self._open = OPEN_PATHS - {_METRICS} if metrics_need_key else OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        key, headers = self._verify(scope["headers"])
        path = path_of(scope)
        is_open = scope["method"] in ("GET", "HEAD") and (
            path in self._open or _PAGE_PATH.fullmatch(path) is not None
        )
        granted = {KeyScope.READ} if is_open and path == _METRICS else set()
        if key is not None:
            verified = {SCOPE_KEY: key.tenant, SCOPES_KEY: key.scopes | granted}
            await self._app({**scope, "headers": headers, **verified}, receive, send)
        elif is_open:
            await self._app({**scope, SCOPES_KEY: granted}, receive, send)
        else:
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
        sent, found = tenant_of_key(key), None
        # All digests have one length, and all are compared, so the time reveals nothing about the keys
        for plain in self._plain:
            if secrets.compare_digest(sent, plain.tenant) and found is None:
                found = plain
        return self._file.find(key) if found is None and self._file is not None else found


class NoKeys:
    """Without keys, every program may use and read, and only programs on this machine may administrate.

    A program is on this machine if the proxy listens on a loopback address only, no other proxy forwarded the
    request, and no web page sent it: a page in a browser on this machine can reach loopback addresses too.
    """

    def __init__(self, app: ASGIApp, loopback: bool, cors_origins: Collection[str] = ()) -> None:
        """`loopback`: whether the proxy listens on a loopback address only."""
        self._app = app
        self._loopback = loopback
        self._origins = frozenset(origin.encode() for origin in cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Put the scopes of one request into its ASGI scope. Raises Forbidden, as `check_page`."""
        if scope["type"] == "http":
            sent = dict(scope["headers"])
            check_page(sent, self._origins)
            local = self._loopback and self._is_local(sent)
            # what the gate gave to a request with an unexpected name stays
            scope = {SCOPES_KEY: EVERY_SCOPE if local else WITHOUT_ADMIN, **scope}
        await self._app(scope, receive, send)

    def _is_local(self, sent: Mapping[bytes, bytes]) -> bool:
        if b"origin" in sent and sent[b"origin"] not in self._origins:
            return False
        return _FORWARDED.isdisjoint(sent) and (b"host" not in sent or is_loopback(host_name(sent[b"host"])))


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
