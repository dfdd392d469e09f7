"""The proxy in front of stock vLLM servers, and the services that it shares with the plugin: wiring only."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from prometheus_client import ProcessCollector
from starlette.middleware.cors import CORSMiddleware

from chat_tokenizer import TokenizerUnavailable
from chat_tokenizer.files import check_source
from tokenproxy import __version__
from tokenproxy.app.start import cache_share
from tokenproxy.base.http import Request, Response
from tokenproxy.base.types import ASGIApp
from tokenproxy.base.urls import url_credentials
from tokenproxy.engine.http import HttpEngine
from tokenproxy.engine.protocol import MonitoredEngine
from tokenproxy.fleet.choosing import Routing
from tokenproxy.fleet.fleet import Fleet
from tokenproxy.fleet.membership import Membership, Resolve, fleet_id, resolve_host
from tokenproxy.fleet.queue import Suspension
from tokenproxy.fleet.replica import RETRY_S, Replica
from tokenproxy.fleet.tokenizers import Tokenizers
from tokenproxy.fleet.weight_calls import WeightCalls
from tokenproxy.monitoring.exchange import Monitor, Observer
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.monitoring.tracing import make_tracing
from tokenproxy.record.appending import Auditor
from tokenproxy.record.encoders import EncoderPool
from tokenproxy.record.history import History
from tokenproxy.record.images import ImageLoader
from tokenproxy.record.session_keys import SessionKeys
from tokenproxy.record.store import Limits
from tokenproxy.settings import Settings, SettingsError
from tokenproxy.settings.groups import proof_folder
from tokenproxy.store.fleet_words import StoredWords
from tokenproxy.store.guarded import GuardedStore
from tokenproxy.store.urls import make_store
from tokenproxy.turn.services import ModelAliases, RunningRequests, Services
from tokenproxy.web.credentials import EngineCredentials, TenantOf, tenant_in_scope
from tokenproxy.web.gate import ApiKeys, Gate, NoKeys, is_loopback
from tokenproxy.web.keys import KeyFile, read_keys
from tokenproxy.web.routes import all_routes, mount

_IDLE_TIMEOUT_S = 600.0
"""How long a stream of an engine may pause: as long as clients wait by default."""


def make_services(
    settings: Settings, fleet: Fleet, metrics: Metrics, running: RunningRequests | None = None
) -> Services:
    """Create the services of one application. Open their history before the first request."""
    encoders = EncoderPool()
    limits = Limits(max_bytes=settings.store_max_bytes, max_age_s=settings.store_max_age_s)
    auditor = Auditor(metrics, proof_folder())
    store = make_store(settings.store, limits)
    guarded = GuardedStore(store, metrics, required=settings.store_required)
    images = ImageLoader(encoders, fetch=_image_fetch(settings.image_hosts))
    shared, name = settings.store != "memory:", fleet_id(settings.upstreams, settings.upstreams_file)
    fleet.weights.words = StoredWords(guarded, f"{name}/weights", shared=shared)
    return Services(
        fleet,
        guarded,
        History(
            guarded,
            encoders,
            metrics,
            cache_share(settings.workers) if settings.cache_bytes is None else settings.cache_bytes,
            auditor,
            settings.overflow,
            settings.finish_after_s,
            images,
            settings.thinking_policy,
            settings.echo_policy,
            settings.processed_logprobs_required,
        ),
        WeightCalls(fleet, metrics),
        encoders,
        settings,
        model_aliases=ModelAliases(settings.model_aliases),
        running=running or RunningRequests(),
    )


def _image_fetch(hosts: Sequence[str]) -> Callable[[str], Awaitable[bytes]] | None:
    """What loads images from the web; None if no host is allowed."""
    if not hosts:
        return None
    from tokenproxy.base.image_fetch import ImageFetcher  # its HTTP client takes long to import

    return ImageFetcher(hosts).fetch


def lends_credentials(settings: Settings) -> bool:
    """Whether the proxy adds its own credentials to the requests that it sends to engines for clients."""
    return settings.upstream_api_key is not None or any(map(url_credentials, settings.upstreams))


def check_settings(settings: Settings, processes: int) -> None:
    """Refuse settings with which the proxy cannot or must not serve.

    Args:
        processes: how many serve together.

    Raises:
        SettingsError: a value cannot be used; every client that reaches the proxy could use the engine's key;
            or the turns would be kept in the memory of each process.
    """
    checks: dict[str, Callable[[], object]] = {
        "store": lambda: make_store(settings.store, Limits()),
        "model_aliases": lambda: ModelAliases(settings.model_aliases),
        "api_key_file": lambda: settings.api_key_file and read_keys(settings.api_key_file),
        "tokenizer": partial(check_source, settings.tokenizer or ""),
    }
    for name, check in checks.items():
        try:
            check()
        except (ValueError, TokenizerUnavailable) as error:
            raise SettingsError(f"{name}: {error}") from error
    lends = lends_credentials(settings) and not settings.asks_for_keys
    if lends and not is_loopback(settings.host):
        name = "`upstream_api_key`" if settings.upstream_api_key else "the user in an upstream's URL"
        raise SettingsError(
            f"every client that reaches host {settings.host} could use the engines with {name}: "
            "set `api_key` (--api-key KEY), or listen on 127.0.0.1"
        )
    if processes > 1 and settings.store == "memory:":
        raise SettingsError(
            f"{processes} `workers` cannot share turns that `store: memory:` keeps in each process: "
            "set `store` to sqlite:///FILE or redis://HOST:PORT/DB, or pass --workers 1"
        )


@asynccontextmanager
async def running(services: Services) -> AsyncIterator[Services]:
    """Open the store and watch the engines; on exit, close the store, engines and encoder threads."""
    async with AsyncExitStack() as stack:
        # Closed in reverse order: a turn that is being recorded when the store closes may still need the
        # threads
        stack.push_async_callback(asyncio.to_thread, services.encoders.shutdown)
        stack.push_async_callback(services.fleet.stop)
        await services.history.open()
        stack.push_async_callback(services.history.aclose)
        stack.push_async_callback(services.fleet.watch.stop)  # it uses the store, and so do admin calls
        stack.push_async_callback(services.admin_calls.stop)
        services.fleet.watch.report_late = services.history.metrics.tick
        services.fleet.start()
        yield services


def create_app(
    settings: Settings,
    requests: RunningRequests | None = None,
    metrics: Metrics | None = None,
    resolve: Resolve | None = None,
    retry_s: float = RETRY_S,
) -> FastAPI:
    """Create the FastAPI application in front of the engines of `settings.upstreams`.

    Args:
        requests: counts the running requests, for a server that cuts them off when it stops.
        metrics: the metrics of this process; None creates them.
        resolve: finds the engines that a name among `settings.upstreams` stands for; None asks DNS.
        retry_s: seconds until the next check of an engine that does not respond.
    """
    key_file = KeyFile(settings.api_key_file) if settings.api_key_file else None
    if metrics is None:
        metrics = Metrics()
        ProcessCollector(registry=metrics.registry)
    observer = Observer(metrics, make_tracing())

    fleet = Fleet(  # its membership adds the replicas
        [],
        replica_requests=settings.replica_requests,
        watch_interval_s=settings.watch_interval_s,
        weight_update_timeout_s=settings.weight_update_timeout_s,
        admission_wait_s=settings.admission_wait_s,
    )
    services = make_services(settings, fleet, metrics, requests)
    if settings.asks_for_keys:
        services.session_keys = SessionKeys(services.store, services.history.echoes.signer)
    services.membership = membership = Membership(
        fleet,
        _replica_maker(settings, metrics, fleet.weights.suspension, retry_s),
        StoredWords(services.store, fleet_id(settings.upstreams, settings.upstreams_file)),
        settings.upstreams,
        settings.upstreams_file,
        resolve or resolve_host,
    )

    def send(request: Request) -> Awaitable[Response]:
        # it needs no weights, so that a paused fleet does not hold it up
        return fleet.send_to_any(request, Routing(samples=False))

    credentials = EngineCredentials(send, lend=fleet.lend_credential)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with aclosing(observer), running(services), aclosing(credentials):
            await membership.refresh()
            run_forever = services.history.tasks.run_forever
            run_forever(membership.watch, "the list of engines could not be brought up to date")
            if key_file is not None:
                run_forever(key_file.watch, "a changed `api_key_file` is not noticed")
            if (keys := services.session_keys) is not None:
                await keys.refresh()
                run_forever(keys.watch, "keys of sessions that other processes ended stay valid")
            yield

    app = FastAPI(title="tokenproxy", version=__version__, lifespan=lifespan, redirect_slashes=False)
    tenant_of = _tenant_of(settings, credentials)
    endpoints = mount(app, lambda scope: services, tenant_of, observer, inside_vllm=False)
    guard(app, settings, endpoints, observer, key_file, services.session_keys)
    return app


def add_to_lifespan(app: FastAPI, block: Callable[[], AbstractAsyncContextManager[object]]) -> None:
    """Run a block in the lifespan of an application; it ends while all of that one's state is there."""
    lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def extended(app: FastAPI) -> AsyncIterator[Any]:
        async with lifespan(app) as state, block():
            yield state

    app.router.lifespan_context = extended


def _replica_maker(
    settings: Settings, metrics: Metrics, suspension: Suspension, retry_s: float
) -> Callable[[str], Replica]:
    """A function that creates the replica of a base URL. All replicas share the tokenizers.

    Args:
        suspension: time in which streams may pause for longer.
    """
    tokenizers = Tokenizers(
        settings.tokenizer,
        settings.chat_template.read_text() if settings.chat_template else None,
        trust_remote_code=settings.trust_remote_code,
        proof_folder=proof_folder(),
    )
    key = settings.upstream_api_key.get_secret_value() if settings.upstream_api_key else None

    def make_replica(url: str) -> Replica:
        engine = HttpEngine(
            url,
            key,
            idle_timeout_s=_IDLE_TIMEOUT_S,
            suspended_seconds=suspension.seconds,
        )
        monitored = MonitoredEngine(engine, metrics)
        return Replica(monitored, tokenizers, metrics, settings.watch_interval_s, retry_s=retry_s)

    return make_replica


def guard(
    app: FastAPI,
    settings: Settings,
    endpoints: Mapping[tuple[str, str], ASGIApp],
    observer: Observer,
    key_file: KeyFile | None = None,
    session_keys: SessionKeys | None = None,
) -> None:
    """Add the middlewares; the one added last gets a request first.

    Args:
        endpoints: as `mount` returned them.
    """
    clients: ApiKeys | NoKeys = NoKeys(settings.cors_origins)
    if settings.asks_for_keys:
        keys, admin_keys = (
            [key.get_secret_value() for key in group] for group in (settings.api_key, settings.admin_key)
        )
        clients = ApiKeys(keys, admin_keys, key_file, settings.metrics_need_key, session_keys)
    app.add_middleware(
        Gate,
        routes=all_routes(),
        endpoints=endpoints,
        clients=clients,
        allowed_hosts=settings.allowed_hosts,
        loopback=not settings.asks_for_keys and is_loopback(settings.host),
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    # the outermost: it also observes the requests that the others refuse
    app.add_middleware(Monitor, observer=observer)


def _tenant_of(settings: Settings, credentials: EngineCredentials) -> TenantOf:
    """Choose what verifies credentials: the proxy with its own keys, or the engine."""
    # the engine sees the proxy's key only, from every client, if it lends one
    own = settings.asks_for_keys or lends_credentials(settings)
    return tenant_in_scope if own else credentials.tenant_of
