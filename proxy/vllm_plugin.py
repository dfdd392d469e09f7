"""The routes inside vLLM's own API server, as an endpoint plugin: wiring only.

vLLM calls `attach_router` once per API server process while it builds its application, and `init_state` when
the engine is up. It has no hook for the end of a plugin, so `attach_router` also wraps the application's
lifespan. The engine is reached through vLLM's own routes, in the same process.
"""

import logging
import os
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from prometheus_client import REGISTRY, CollectorRegistry

from proxy.app import running
from proxy.engine.inprocess import InProcessEngine, inner_app
from proxy.errors import EngineUnavailable
from proxy.fleet.fleet import Fleet
from proxy.fleet.replica import Replica
from proxy.fleet.tokenizers import Tokenizers
from proxy.metrics import Metrics
from proxy.routes.credentials import EngineCredentials
from proxy.routes.mount import mount
from proxy.services import make_services
from proxy.settings import load_settings
from proxy.turn.services import Services
from proxy.types import Scope
from tokenization.content_format import ContentFormat

log = logging.getLogger("tokenproxy")

CONFIG_VARIABLE = "TOKENPROXY_CONFIG"


class TokenProxyPlugin:
    """The endpoint plugin that the entry point `vllm.endpoint_plugins` resolves to."""

    name = "tokenproxy"
    required_tasks = ("generate",)

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        """`registry` is where counters go: the one whose page vLLM serves."""
        self._registry = registry
        self._engine: InProcessEngine | None = None
        self._services: Services | None = None
        self._opened = AsyncExitStack()

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes to vLLM's own; where paths are equal, vLLM lets the plugin's take their place."""
        self._engine = InProcessEngine(inner_app(app))
        # Turns and sessions are guarded wherever inference is. vLLM's --api-key guards paths that begin with
        # /v1 only, so the whole application is asked, with its middleware: a route of vLLM's own, /v1/models
        credentials = EngineCredentials(InProcessEngine(app, "vLLM").send)
        self._opened.push_async_callback(credentials.aclose)
        mount(app, self._services_or_unavailable, credentials.tenant_of, inside_vllm=True)
        _close_at_shutdown(app, self.aclose)

    async def aclose(self) -> None:
        """Close the store, the replica's tasks and the encoder threads; a failure is only logged."""
        self._services = None
        try:
            await self._opened.aclose()
        except Exception:  # the boundary to vLLM
            log.exception("tokenproxy could not be closed in order")

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Open the store and start to ask the engine what it can do; called when it is up."""
        assert self._engine is not None  # vLLM calls attach_router first
        _show_log()
        settings = load_settings(_config_file())
        source = settings.tokenizer or getattr(args, "tokenizer", None)
        rendering = _rendering(state, args)
        template = _template_text(str(settings.chat_template or "") or rendering.chat_template)
        trust = settings.trust_remote_code or bool(getattr(args, "trust_remote_code", False))
        revision = getattr(args, "tokenizer_revision", None) or getattr(args, "revision", None)
        tokenizers = Tokenizers(
            source,
            template,
            trust,
            revision,
            rendering.content_format,
            rendering.default_template_kwargs,
            settings.proof_folder,
        )
        mode = str(getattr(args, "logprobs_mode", None) or "")
        replica = Replica(self._engine, tokenizers, settings.token_in, settings.watch_interval_s, mode)
        fleet = Fleet([replica])
        if settings.store == "memory:" and (getattr(args, "api_server_count", 1) or 1) > 1:
            log.warning(
                "`store` is memory: and there are %d API server processes: a conversation is recognised only "
                "by the process that recorded it", args.api_server_count,
            )  # fmt: skip
        encoders = ThreadPoolExecutor(settings.encoder_threads, "encode")
        services = make_services(settings, fleet, encoders, Metrics(self._registry))
        self._services = await self._opened.enter_async_context(running(services))

    def _services_or_unavailable(self, scope: Scope) -> Services:
        if self._services is None:
            raise EngineUnavailable("vLLM is starting or stopping")
        return self._services


def _close_at_shutdown(app: FastAPI, close: Callable[[], Awaitable[None]]) -> None:
    """Call `close` at the end of the application's lifespan, while all of its state is still there."""
    lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def closing(app: FastAPI) -> AsyncIterator[Any]:
        async with lifespan(app) as state:
            try:
                yield state
            finally:
                await close()

    app.router.lifespan_context = closing


def _config_file() -> Path | None:
    value = os.environ.get(CONFIG_VARIABLE)
    return Path(value) if value else None


@dataclass(frozen=True, slots=True)
class _Rendering:
    """What vLLM renders with, next to the tokenizer."""

    chat_template: str | None
    """A path or the template itself; None if it is the model's own."""
    content_format: ContentFormat | None
    """None if vLLM detects it."""
    default_template_kwargs: Mapping[str, Any]


def _rendering(state: Any, args: Namespace) -> _Rendering:
    """What vLLM's renderer has resolved, or else what its arguments state."""
    names = ("chat_template", "chat_template_content_format", "default_chat_template_kwargs")
    renderer = getattr(state, "online_renderer", None)
    template, content_format, kwargs = (
        getattr(renderer, name, None) or getattr(args, name, None) for name in names
    )
    return _Rendering(
        template, content_format if content_format in ("string", "openai") else None, kwargs or {}
    )


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
        ours.handlers = list(theirs.handlers)
        ours.setLevel(logging.INFO)
        ours.propagate = False
