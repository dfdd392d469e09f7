"""The routes inside vLLM's own API server, as an endpoint plugin: wiring only.

vLLM calls `attach_router` once per API server process while it builds its application, and `init_state` when
the engine is up. It has no hook for the end of a plugin, so `attach_router` also wraps the application's
lifespan. The engine is reached through vLLM's own routes, in the same process.
"""

import asyncio
import logging
import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from prometheus_client import REGISTRY, CollectorRegistry

from chat_tokenizer.template import ContentFormat
from tokenproxy.app.app import add_to_lifespan, check_settings, make_services, running
from tokenproxy.base.errors import EngineUnavailable
from tokenproxy.base.request import EngineRoute
from tokenproxy.base.types import Scope
from tokenproxy.engine.inprocess import InProcessEngine, inner_app
from tokenproxy.engine.protocol import MonitoredEngine
from tokenproxy.engine.versions import check_first, put_first
from tokenproxy.fleet.fleet import Fleet
from tokenproxy.fleet.replica import Replica
from tokenproxy.fleet.tokenizers import Tokenizers
from tokenproxy.monitoring.exchange import Observer
from tokenproxy.monitoring.logs import RelayHandler
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.monitoring.tracing import make_tracing
from tokenproxy.settings import load_settings
from tokenproxy.settings.groups import proof_folder
from tokenproxy.turn.services import RunningRequests, Services
from tokenproxy.web.credentials import EngineCredentials
from tokenproxy.web.routes import mount

log = logging.getLogger("tokenproxy")

CONFIG_VARIABLE = "TOKENPROXY_CONFIG"

_WATCH_S = 0.25
"""Seconds between two checks whether vLLM's server is stopping."""
_CUT_AFTER_S = 2.0
"""How long responses may take to send what vLLM's engine sampled before it ended."""


class TokenProxyPlugin:
    """The endpoint plugin that the entry point `vllm.endpoint_plugins` resolves to."""

    name = "tokenproxy"
    required_tasks = ("generate",)

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        """`registry`: where to register metrics; vLLM serves this registry's page."""
        self._registry = registry
        self._engine: MonitoredEngine | None = None
        self._observer: Observer | None = None
        self._services: Services | None = None
        self._opened = AsyncExitStack()
        self._check_routes: Callable[[], None]

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes to vLLM's own. Where paths are equal, the plugin's route replaces vLLM's."""
        theirs = list(app.router.routes)
        self._observer = Observer(Metrics(self._registry))
        self._engine = MonitoredEngine(InProcessEngine(inner_app(app)), self._observer.metrics)
        # Turns and sessions are guarded wherever inference is. vLLM's --api-key guards paths that begin with
        # /v1 only, so credentials are verified by a request for vLLM's /v1/models to the whole application
        credentials = EngineCredentials(InProcessEngine(app, "vLLM").send)
        self._opened.push_async_callback(credentials.aclose)
        mount(
            app,
            self._services_or_unavailable,
            credentials.tenant_of,
            self._observer,
            inside_vllm=True,
            # vLLM's own route then answers that it is disabled
            disabled=() if _serves_generate(app) else (EngineRoute.GENERATE,),
        )
        added = [route for route in app.router.routes if route not in theirs]
        put_first(app, added)
        self._check_routes = partial(check_first, app, added)
        add_to_lifespan(app, lambda: aclosing(self))

    async def aclose(self) -> None:
        """Close the store, the replica's tasks and the encoder threads; a failure is only logged."""
        self._services = None
        try:
            await self._opened.aclose()
        except Exception:  # the boundary to vLLM
            log.exception("tokenproxy could not be closed in order")

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Open the store and start to ask the engine what it can do; called when it is up.

        Raises:
            RouteTaken: another handler answers for one of the routes.
        """
        assert self._engine is not None and self._observer is not None  # vLLM calls attach_router before it
        self._check_routes()
        _show_log()
        # not earlier: with --otlp-traces-endpoint vLLM has made its tracer provider by now
        self._observer.tracing = make_tracing()
        self._opened.push_async_callback(self._observer.aclose)
        file = os.environ.get(CONFIG_VARIABLE)
        settings = load_settings(Path(file) if file else None)
        check_settings(settings, processes=1)  # several servers with memory: are warned below
        source = settings.tokenizer or getattr(args, "tokenizer", None)
        own_template, content_format, template_kwargs = _rendering(state, args)
        template = _template_text(str(settings.chat_template or "") or own_template)
        trust = settings.trust_remote_code or bool(getattr(args, "trust_remote_code", False))
        revision = getattr(args, "tokenizer_revision", None) or getattr(args, "revision", None)
        tokenizers = Tokenizers(
            source,
            template,
            trust_remote_code=trust,
            revision=revision,
            content_format=content_format,
            default_template_kwargs=template_kwargs,
            proof_folder=proof_folder(),
        )
        mode = str(getattr(args, "logprobs_mode", None) or "")
        metrics = self._observer.metrics
        replica = Replica(self._engine, tokenizers, metrics, settings.watch_interval_s, mode)
        fleet = Fleet(
            [replica],
            watch_interval_s=settings.watch_interval_s,
            weight_update_timeout_s=settings.weight_update_timeout_s,
            admission_wait_s=settings.admission_wait_s,
        )
        if settings.store == "memory:" and (getattr(args, "api_server_count", 1) or 1) > 1:
            log.warning(
                "`store` is memory: and there are %d API server processes: a conversation is recognised only "
                "by the process that recorded it", args.api_server_count,
            )  # fmt: skip
        services = make_services(settings, fleet, metrics)
        self._services = await self._opened.enter_async_context(running(services))
        watch = asyncio.create_task(_cut_at_end(state, services.running))
        self._opened.callback(watch.cancel)

    def _services_or_unavailable(self, scope: Scope) -> Services:
        if self._services is None:
            raise EngineUnavailable("vLLM is starting or stopping")
        return self._services


def _serves_generate(app: FastAPI) -> bool:
    """Whether clients may use vLLM's generate route; the engine of `inner_app` has it in any case."""
    args = getattr(app.state, "args", None)
    # a version of vLLM without the flag has the route always
    enabled = getattr(args, "enable_scale_out", args is not None)
    return bool(enabled or getattr(args, "tokens_only", False))


async def _cut_at_end(state: Any, running: RunningRequests) -> None:
    """Cut the requests that vLLM's server would wait for although its engine has ended.

    On SIGTERM vLLM stops its engine (after `--shutdown-timeout`), then sets `should_exit` of the server that
    it keeps in the application's state, then waits until every connection is closed. A stream whose engine
    has ended gets no more events, so that its client would wait too.
    """
    while not getattr(getattr(state, "server", None), "should_exit", False):  # noqa: ASYNC110 - no event there
        await asyncio.sleep(_WATCH_S)
    running.stopping = True
    await asyncio.sleep(_CUT_AFTER_S)
    if count := running.cut():
        log.warning("vLLM stops: %d requests are cut", count)


def _rendering(state: Any, args: Namespace) -> tuple[str | None, ContentFormat | None, Mapping[str, Any]]:
    """The settings that vLLM's renderer has resolved; without a renderer, those of vLLM's arguments.

    Returns the chat template, a path or itself, or None for the model's own; the content format, None if
    vLLM detects it; and the template's default arguments.
    """
    names = ("chat_template", "chat_template_content_format", "default_chat_template_kwargs")
    renderer = getattr(state, "online_renderer", None)
    template, content_format, kwargs = (
        getattr(renderer, name, None) or getattr(args, name, None) for name in names
    )
    return template, content_format if content_format in ("string", "openai") else None, kwargs or {}


def _template_text(value: str | None) -> str | None:
    """The template vLLM runs with: it takes a path or the template itself."""
    if value is None:
        return None
    path = Path(value)
    return path.read_text() if "{" not in value and path.is_file() else value


def _show_log() -> None:
    """Give our logger the handlers of vLLM's, which configures its own only."""
    ours, theirs = logging.getLogger("tokenproxy"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = [RelayHandler(theirs.handlers)]
        ours.setLevel(logging.INFO)
        ours.propagate = False
