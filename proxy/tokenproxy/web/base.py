"""A route: a path, and a function from a request to a response."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tokenproxy.base.http import Request, Response
from tokenproxy.formats.bounds import CHECKED_FROM_BYTES, check_bounds
from tokenproxy.record.store import Session, session_id
from tokenproxy.turn.services import Services
from tokenproxy.viewer.recording import RecordedSession
from tokenproxy.web.keys import KeyScope
from tokenproxy.web.parameters import Query, session_in_path, unknown_session

T = TypeVar("T")


class Route(ABC):
    """One route. `routes.py` lists all of them."""

    path: str
    """The route's path, a template in Starlette's syntax; see `paths.py` for others that lead to it."""
    methods: tuple[str, ...] = ("POST",)
    inside_vllm: bool = True
    """Whether it is mounted inside vLLM too; False if vLLM has its own route for it."""
    replaces_engine_route: bool = False
    """Whether it is mounted inside vLLM only if vLLM serves its path, and observes vLLM's own route then."""
    needs_tenant: bool = True
    """Whether the client's credential is verified first and `Request.tenant` is set."""
    key_scope: KeyScope | None = KeyScope.INFERENCE
    """The scope that an API key of the proxy needs for it; None where no key is needed."""
    body_limit_bytes: int | None = None
    """The most bytes of a request's body, if fewer than the setting of this name allows."""
    store_seconds: float | None = None
    """How long one request waits for the store, all its calls together; None for `store_timeout_s`."""
    catches_all: bool = False
    observed: bool = True
    """Whether its requests are timed, counted as in flight and logged; False for health checks and
    scrapes."""
    is_public: bool = True
    """Whether the OpenAPI page shows it; False for what only the viewer's page reads."""
    summary: str = ""
    openapi: Mapping[str, Any] = {}
    """The route's description on the OpenAPI page."""

    @abstractmethod
    async def answer(self, incoming: Request, gateway: Services, /) -> Response:
        """Respond to a request.

        Raises:
            ApiError: becomes the error object that the client gets.
            StoreError: becomes a 503.
        """

    def needed_scope(self, method: str, path: str) -> KeyScope | None:
        """The scope that an API key needs for a request; `path` is its canonical path, decoded."""
        return self.key_scope

    @property
    def description(self) -> str:
        """The route's entry on the OpenAPI page."""
        return type(self).answer.__doc__ or ""

    @property
    def label(self) -> str:
        """The route's name in metrics: its path, which is a template."""
        return "other" if self.catches_all else self.path


class StoreRoute(Route):
    """Base of the routes that need the store only, not an engine (except to verify credentials)."""

    # a longer limit, because a session may be large, and these routes cannot respond without the store
    store_seconds = 10.0
    body_limit_bytes = 2**20
    reading_scope: KeyScope = KeyScope.READ
    """The scope that an API key needs to read."""

    def needed_scope(self, method: str, path: str) -> KeyScope | None:
        """See `Route.needed_scope`: who may sample may also make, reward and delete the sessions of it."""
        return self.reading_scope if method in ("GET", "HEAD") else self.key_scope


class SessionRoute(StoreRoute):
    """Base of the routes that show one recorded session, which their path names."""

    methods: tuple[str, ...] = ("GET",)
    parameters: tuple[str, ...] = ()
    """Names in the query."""

    async def answer(self, request: Request, services: Services, /) -> Response:
        """See `show`."""
        query = Query(request, self.parameters, several=("class",))
        store, name = services.store, session_in_path(request)
        session = await store.session(session_id(request.tenant, name))
        if session is None:
            raise unknown_session(name)
        turns = await store.turns(session.id) if self.needs_turns(query, session) else []
        return await self.show(query, services, RecordedSession(session, turns, session.rewards))

    def needs_turns(self, query: Query, session: Session) -> bool:
        """Whether the response depends on the turns."""
        return True

    @abstractmethod
    async def show(self, query: Query, services: Services, found: RecordedSession) -> Response:
        """The response for a session."""

    @property
    def description(self) -> str:
        """See `Route.description`."""
        return type(self).show.__doc__ or ""


async def parse_bounded(request: Request, services: Services, parse: Callable[[], T]) -> T:
    """Parse a request with `parse`, on a thread if its body is large: that would block the event loop.

    Raises:
        BodyTooLarge: as `check_bounds`.
        Overloaded: the threads have too much to do already.
        ApiError: as `parse`.
    """
    if len(request.body) < CHECKED_FROM_BYTES:
        return parse()

    def check_and_parse() -> T:
        check_bounds(request.body)
        return parse()

    return await services.encoders.run(check_and_parse, len(request.body))
