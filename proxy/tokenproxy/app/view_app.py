"""The viewer of a store without a proxy: the page and what it reads, on a loopback address."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from math import inf

from fastapi import FastAPI
from msgspec.structs import replace

from chat_tokenizer import ChatTokenizer
from tokenproxy.app.app import make_services
from tokenproxy.app.server import Server, server_config
from tokenproxy.app.start import bind, try_store
from tokenproxy.base.errors import Unsupported, UsageError
from tokenproxy.base.types import Scope
from tokenproxy.engine.discovery import Capabilities
from tokenproxy.fleet.fleet import Fleet
from tokenproxy.fleet.model import FleetModel
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.monitoring.middleware import Monitor, Observer
from tokenproxy.record.store import Limits, Session
from tokenproxy.record.turn import Turn
from tokenproxy.settings import Settings
from tokenproxy.store.guarded import GuardedStore
from tokenproxy.store.urls import make_store, place
from tokenproxy.turn.services import RunningRequests, Services
from tokenproxy.web.auth import NoKeys
from tokenproxy.web.credentials import tenant_in_scope
from tokenproxy.web.gate import Gate
from tokenproxy.web.routes import all_routes, mount

_TENANT = re.compile("(?<=^[0-9a-f]{32})=2F")
_NO_TOKENIZER = Unsupported("pass --tokenizer MODEL to see the texts of the ids")


class _EveryTenant(GuardedStore):
    """Shows the sessions of all tenants as those of one: `DIGEST=2FNAME` where they have one."""

    async def session(self, rollout: str) -> Session | None:
        """See `Store.session`."""
        found = await super().session(_TENANT.sub("/", rollout))
        return _shown(found) if found else None

    async def sessions(self, *, limit: int, tenant: str | None = None, before: float = inf) -> list[Session]:
        """See `Store.sessions`."""
        found = await self.__getattr__("sessions")(limit=limit, before=before)
        return [_shown(session) for session in found]

    async def turns(self, rollout: str) -> list[Turn]:
        """See `Store.turns`."""
        return await super().turns(_TENANT.sub("/", rollout))


def _shown(session: Session) -> Session:
    return replace(session, id=session.id.replace("/", "=2F"), tenant="")


def serve_store(settings: Settings, tokenizer: ChatTokenizer | None) -> int:
    """Serve the viewer of the store of some settings until a signal arrives; returns the exit code.

    Raises:
        UsageError: the port is taken.
        StoreError: the store cannot be read.
    """
    asyncio.run(try_store(settings))
    try:
        sockets = asyncio.run(bind(settings.host, settings.port))
    except OSError as error:
        raise UsageError(f"port {settings.port}: {error.strerror}: pass another --port") from error
    url = f"http://{settings.host}:{sockets[0].getsockname()[1]}/viewer"
    running = RunningRequests()
    server = Server(server_config(settings, running, app=create_view_app(settings, tokenizer)), running, 0, 1)
    server.announce = partial(print, f"{url} shows {place(settings.store)} until Ctrl-C", flush=True)
    server.run(sockets)
    return 0 if server.started else 1


def create_view_app(settings: Settings, tokenizer: ChatTokenizer | None) -> FastAPI:
    """The application with the routes of the viewer alone, which change nothing."""
    metrics, routes = Metrics(), all_routes()
    services = make_services(settings, Fleet([]), metrics)
    store = make_store(settings.store, Limits())
    services.store = _EveryTenant(store, metrics, required=True)
    problem = None if tokenizer else _NO_TOKENIZER
    services.fleet.model = FleetModel(Capabilities("", None, (), None), tokenizer, problem)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await services.store.open()
        yield
        await services.store.aclose()

    def services_of(scope: Scope) -> Services:
        return services

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    others = [route.path for route in routes if not route.path.startswith("/viewer")]
    mount(app, services_of, tenant_in_scope, Observer(metrics), inside_vllm=False, disabled=others)
    app.add_middleware(NoKeys, loopback=True)
    app.add_middleware(Gate, routes=routes, loopback=True)
    app.add_middleware(Monitor, observer=Observer(metrics))
    return app
