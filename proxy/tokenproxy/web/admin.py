"""The admin routes: which engines the proxy uses, and those of the engines, sent to all replicas."""

from collections.abc import Iterator
from contextlib import contextmanager

from tokenproxy.base.errors import BadRequest, NotFound
from tokenproxy.base.fields import parse, read
from tokenproxy.base.http import Request, Response, json_response, query_value
from tokenproxy.base.urls import normalise_base_url, without_credentials
from tokenproxy.fleet.admin_calls import ADMIN_CALLS, AdminCall
from tokenproxy.fleet.membership import Membership
from tokenproxy.formats.base import header
from tokenproxy.turn.services import Services
from tokenproxy.web.base import Route
from tokenproxy.web.keys import KeyScope


class Replicas(Route):
    """List, add and remove replicas."""

    path = "/admin/replicas"
    methods = ("GET", "POST", "DELETE")
    inside_vllm = False
    needs_tenant = False
    key_scope = KeyScope.ADMIN
    summary = "The replicas: list, add, remove"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """GET lists them as `/ready` does. POST `{"url"}` adds one; DELETE `?url=` removes one.

        Requests that run on a removed replica end normally, and others notice nothing. All processes of the
        fleet that share the store apply a change; if the store does not take it, nothing changes (503).
        """
        membership = _membership(services)
        with _named_in("url"):
            if request.method == "POST":
                await membership.add(_url_in_body(request))
            elif request.method == "DELETE":
                url = query_value(request, "url", "")
                if not await membership.remove(url):
                    raise _unknown(url)
        return _listed(services)


class Drain(Route):
    """Let a replica finish what it does, and send it nothing more."""

    path = "/admin/replicas/drain"
    inside_vllm = False
    needs_tenant = False
    key_scope = KeyScope.ADMIN
    summary = "Drain a replica: it gets no more requests"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`{"url"}`; `requests` in the answer tells how many still run. Adding it again ends the draining."""
        url = _url_in_body(request)
        with _named_in("url"):
            if not await _membership(services).drain(url):
                raise _unknown(url)
        return _listed(services)


@contextmanager
def _named_in(param: str) -> Iterator[None]:
    """Raises BadRequest for a parameter that is not the URL of an engine."""
    try:
        yield
    except ValueError as error:
        raise BadRequest(str(error), param=param) from error


def _membership(services: Services) -> Membership:
    assert services.membership is not None  # these routes are not mounted inside vLLM
    return services.membership


def _url_in_body(request: Request) -> str:
    url = read(parse(request.body), "url", str)
    if not url:
        raise BadRequest('`url` is required: {"url": "http://10.0.0.11:8000"}', param="url")
    return url


def _unknown(url: str) -> NotFound:
    return NotFound(f"no replica at {url}: GET /admin/replicas lists them", param="url")


def _listed(services: Services) -> Response:
    changes = _membership(services).changes
    return json_response({"replicas": services.fleet.report(), "changes": changes})


class EngineAdmin(Route):
    """One row of the table in `proxy/tokenproxy/fleet/admin_calls.py`."""

    needs_tenant = False
    key_scope = KeyScope.ADMIN
    replaces_engine_route = True

    def __init__(self, call: AdminCall) -> None:
        self._call = call
        self.path = call.path  # type: ignore[misc]
        self.methods = (call.method,)  # type: ignore[misc]
        self.summary = call.summary  # type: ignore[misc]

    async def answer(self, request: Request, services: Services, /) -> Response:
        """The engine's contract. The call reaches all replicas at once, or the one that `X-Replica` names."""
        return await services.admin_calls.run(self._call, request, named_replica(request))


def engine_admin_routes() -> list[EngineAdmin]:
    """One route for each row of the table."""
    return [EngineAdmin(call) for call in ADMIN_CALLS]


def named_replica(request: Request) -> str:
    """Name of the replica that a request is for; empty if it names none.

    Raises:
        BadRequest: the header is not the URL of an engine.
    """
    value = header(request.headers, b"x-replica")
    if not value:
        return ""
    with _named_in("x-replica"):
        return without_credentials(normalise_base_url(value.decode("latin-1")))
