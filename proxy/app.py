"""The proxy in front of stock vLLM servers: wiring only."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response

from proxy import __version__
from proxy.engine.http import HttpEngine, make_session
from proxy.errors import ApiError
from proxy.fleet.fleet import Fleet
from proxy.fleet.replica import Replica
from proxy.fleet.tokenizers import Tokenizers
from proxy.metrics import Metrics
from proxy.routes.auth import ApiKey
from proxy.routes.mount import mount
from proxy.services import make_services
from proxy.settings import Settings
from proxy.turn.services import Services
from proxy.types import Scope


def create_app(settings: Settings) -> FastAPI:
    """A FastAPI application before the engines of `settings.upstreams`."""

    template = settings.chat_template.read_text() if settings.chat_template else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with make_session(settings.connect_timeout_s) as session:
            key = settings.upstream_api_key.get_secret_value() if settings.upstream_api_key else None
            tokenizers = Tokenizers(settings.tokenizer, template, settings.trust_remote_code)
            replicas = [
                Replica(
                    HttpEngine(url, session, key), tokenizers, settings.token_in, settings.watch_interval_s
                )
                for url in settings.upstreams
            ]
            fleet = Fleet(replicas)
            with ThreadPoolExecutor(settings.encoder_threads, "encode") as encoders:
                gateway = make_services(settings, fleet, encoders, Metrics())
                await gateway.rollouts.open()
                app.state.gateway = gateway
                fleet.start()
                try:
                    yield
                finally:
                    await gateway.rollouts.aclose()
                    await fleet.stop()

    app = FastAPI(title="tokenproxy", version=__version__, lifespan=lifespan)

    def gateway(scope: Scope) -> Services:
        found: Services = app.state.gateway
        return found

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        problem = ApiError("an unexpected error in the proxy; its log has the details")
        return Response(problem.body(), problem.status, media_type="application/json")

    mount(app, gateway, inside_vllm=False)
    if settings.api_key is not None:
        app.add_middleware(ApiKey, key=settings.api_key.get_secret_value())
    return app
