"""`/admin/replicas`: which engines the proxy uses, changed while it runs."""

import msgspec

from proxy.errors import BadRequest, NotFound
from proxy.fields import parse, read
from proxy.fleet.membership import Membership
from proxy.http import JSON_HEADERS, BytesResponse, Request, Response, query_value
from proxy.routes.base import Route
from proxy.routes.scopes import KeyScope
from proxy.turn.services import Services


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
        if request.method == "POST":
            url = _url_in_body(request)
            try:
                await membership.add(url)
            except ValueError as error:
                raise BadRequest(str(error), param="url") from error
        elif request.method == "DELETE":
            url = query_value(request, "url", "")
            try:
                removed = await membership.remove(url)
            except ValueError as error:
                raise BadRequest(str(error), param="url") from error
            if not removed:
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
        try:
            found = await _membership(services).drain(url)
        except ValueError as error:
            raise BadRequest(str(error), param="url") from error
        if not found:
            raise _unknown(url)
        return _listed(services)


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
    report = {"replicas": services.fleet.report(), "changes": _membership(services).changes}
    return BytesResponse(200, list(JSON_HEADERS), msgspec.json.encode(report))
