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
from tokenproxy.app.app import guard, make_services
from tokenproxy.app.server import Server, server_config
from tokenproxy.app.start import bind, try_store
from tokenproxy.base.errors import Unsupported
from tokenproxy.engine.discovery import Capabilities
from tokenproxy.fleet.fleet import Fleet
from tokenproxy.fleet.model import FleetModel
from tokenproxy.monitoring.exchange import Observer
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.store import Limits, Session
from tokenproxy.record.turn import Turn
from tokenproxy.settings import Settings
from tokenproxy.store.guarded import GuardedStore
from tokenproxy.store.urls import make_store, place
from tokenproxy.turn.services import RunningRequests
from tokenproxy.web.credentials import tenant_in_scope
from tokenproxy.web.routes import all_routes, mount

_TENANT = re.compile("(?<=^[0-9a-f]{32})=2F")


class _EveryTenant(GuardedStore):
    """Shows the sessions of all tenants as those of one: `DIGEST=2FNAME` where they have one."""

    async def session(self, rollout: str) -> Session | None:
        """See `Store.session`."""
        found = await super().session(_TENANT.sub("/", rollout))
        return _shown(found) if found else None

    async def sessions(self, *, limit: int, tenant: str | None = None, before: float = inf) -> list[Session]:
        """See `Store.sessions`."""
        found = await super().sessions(limit=limit, before=before)
        return [_shown(session) for session in found]

    async def turns(self, rollout: str) -> list[Turn]:
        """See `Store.turns`."""
        return await super().turns(_TENANT.sub("/", rollout))


def _shown(session: Session) -> Session:
    return replace(session, id=session.id.replace("/", "=2F"), tenant="")


def serve_store(settings: Settings, tokenizer: ChatTokenizer | None) -> int:
    """Serve the viewer of the store of some settings until a signal arrives; returns the exit code.

    Raises:
        StoreError: the store cannot be read.
        OSError: the port is taken.
    """
    asyncio.run(try_store(settings))
    sockets = asyncio.run(bind(settings.host, settings.port))
    url = f"http://{settings.host}:{sockets[0].getsockname()[1]}/viewer"
    running = RunningRequests()
    server = Server(server_config(settings, running, app=create_view_app(settings, tokenizer)), running, 0, 1)
    server.announce = partial(print, f"{url} shows {place(settings.store)} until Ctrl-C", flush=True)
    server.run(sockets)
    return 0 if server.started else 1


def create_view_app(settings: Settings, tokenizer: ChatTokenizer | None) -> FastAPI:
    """The application with the routes of the viewer alone, which change nothing."""
    metrics = Metrics()
    observer, services = Observer(metrics), make_services(settings, Fleet([]), metrics)
    services.store = store = _EveryTenant(make_store(settings.store, Limits()), metrics, required=True)
    problem = None if tokenizer else Unsupported("pass --tokenizer MODEL to see the texts of the ids")
    services.fleet.model = FleetModel(Capabilities("", None, (), None), tokenizer, problem)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await store.open()
        yield
        await store.aclose()

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    others = [route.path for route in all_routes() if not route.path.startswith("/viewer")]
    endpoints = mount(
        app, lambda scope: services, tenant_in_scope, observer, inside_vllm=False, disabled=others
    )
    guard(app, settings, endpoints, observer)
    return app
