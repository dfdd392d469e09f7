"""The base of the routes that need the store, and the numbers in their queries."""

import re
from abc import abstractmethod
from typing import ClassVar

import msgspec

from proxy.errors import BadRequest, EngineUnavailable
from proxy.history.store import StoreError
from proxy.http import JSON_HEADERS, BytesResponse, Request, Response
from proxy.routes.base import Route
from proxy.routes.scopes import KeyScope
from proxy.turn.services import Services
from proxy.types import Headers

_NUMBER = re.compile(r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|inf)", re.IGNORECASE)
"""`float` also takes NaN, digits of other scripts, spaces around them and underscores between them."""


class StoreRoute(Route):
    """Base of the routes that need the store only, not an engine (except to verify credentials)."""

    # a longer limit, because a session may be large, and these routes cannot respond without the store
    store_seconds = 10.0
    response_headers: ClassVar[Headers] = JSON_HEADERS

    def needed_scope(self, method: str, path: str) -> KeyScope | None:
        """See `Route.needed_scope`: who may sample may also make, reward and delete the sessions of it."""
        return KeyScope.READ if method in ("GET", "HEAD") else KeyScope.INFERENCE

    async def answer(self, request: Request, services: Services, /) -> Response:
        """See the route's summary."""
        try:
            status, value = await self.reply(request, services)
        except StoreError as error:
            raise EngineUnavailable(f"the store does not respond, try again later: {error}") from error
        return BytesResponse(status, list(self.response_headers), msgspec.json.encode(value))

    @property
    def description(self) -> str:
        """See `Route.description`."""
        return type(self).reply.__doc__ or ""

    @abstractmethod
    async def reply(self, request: Request, services: Services) -> tuple[int, object]:
        """Status and body. Raises StoreError, ApiError."""


def number(name: str, text: str) -> float:
    """The number that a parameter holds. Raises BadRequest."""
    if not _NUMBER.fullmatch(text):
        raise BadRequest(f"`{name}` must be a number", param=name)
    return float(text)
