"""The proxy in front of stock vLLM servers: wiring only."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager

import fastapi
from fastapi import FastAPI

from proxy import __version__
from proxy.engine.http import HttpEngine, make_session
from proxy.errors import ApiError
from proxy.fleet.fleet import Fleet
from proxy.fleet.replica import Replica
from proxy.fleet.tokenizers import Tokenizers
from proxy.http import Request, Response
from proxy.metrics import Metrics
from proxy.routes.auth import ApiKeys
from proxy.routes.credentials import EngineCredentials, TenantOf, everybody, tenant_in_scope
from proxy.routes.mount import mount
from proxy.services import make_services
from proxy.settings import Settings
from proxy.turn.services import Services
from proxy.types import Scope


@asynccontextmanager
async def running(services: Services) -> AsyncIterator[Services]:
    """Open the store and watch the engines; at the end, close the store, engines and encoder threads."""
    async with AsyncExitStack() as stack:
        # Last in, first out: a turn that is being recorded when the store closes may still need the threads
        stack.push_async_callback(asyncio.to_thread, services.encoders.shutdown)
        stack.push_async_callback(services.fleet.stop)
        await services.history.open()
        stack.push_async_callback(services.history.aclose)
        services.fleet.start()
        yield services


def create_app(settings: Settings) -> FastAPI:
    """A FastAPI application in front of the engines of `settings.upstreams`."""

    template = settings.chat_template.read_text() if settings.chat_template else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with make_session(settings.connect_timeout_s) as session:
            key = settings.upstream_api_key.get_secret_value() if settings.upstream_api_key else None
            tokenizers = Tokenizers(
                settings.tokenizer,
                template,
                settings.trust_remote_code,
                proof_folder=settings.proof_folder,
            )
            replicas = [
                Replica(
                    HttpEngine(url, session, key), tokenizers, settings.token_in, settings.watch_interval_s
                )
                for url in settings.upstreams
            ]
            encoders = ThreadPoolExecutor(settings.encoder_threads, "encode")
            async with running(make_services(settings, Fleet(replicas), encoders, Metrics())) as services:
                app.state.services = services
                try:
                    yield
                finally:
                    await credentials.aclose()

    app = FastAPI(title="tokenproxy", version=__version__, lifespan=lifespan, redirect_slashes=False)

    def services_of(scope: Scope) -> Services:
        services: Services = app.state.services
        return services

    async def send(request: Request) -> Response:
        return await services_of({}).fleet.send_to_any(request)

    async def lend(credential: tuple[bytes, bytes]) -> None:
        await services_of({}).fleet.lend_credential(credential)

    @app.exception_handler(Exception)
    async def unexpected(request: fastapi.Request, error: Exception) -> fastapi.Response:
        problem = ApiError("an unexpected error in the proxy; its log has the details")
        return fastapi.Response(problem.body(), problem.status, media_type="application/json")

    credentials = EngineCredentials(send, lend=lend)
    mount(app, services_of, _tenant_of(settings, credentials), inside_vllm=False)
    if settings.api_key:
        app.add_middleware(ApiKeys, keys=[key.get_secret_value() for key in settings.api_key])
    return app


def _tenant_of(settings: Settings, credentials: EngineCredentials) -> TenantOf:
    """Who verifies credentials: the proxy by its own keys, else the engine."""
    if settings.api_key:
        return tenant_in_scope
    if settings.upstream_api_key is not None:
        return everybody  # the engine sees the proxy's key only, whoever calls
    return credentials.tenant_of
