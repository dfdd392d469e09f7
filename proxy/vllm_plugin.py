"""The routes inside vLLM's own API server, as an endpoint plugin: wiring only.

vLLM calls `attach_router` once per API server process while it builds its application, and `init_state` when
the engine is up. The engine is reached through vLLM's own routes, in the same process.
"""

import logging
import os
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from prometheus_client import REGISTRY, CollectorRegistry

from proxy.engine.inprocess import InProcessEngine, inner_app
from proxy.errors import EngineUnavailable
from proxy.fleet.fleet import Fleet
from proxy.fleet.replica import Replica
from proxy.fleet.tokenizers import Tokenizers
from proxy.metrics import Metrics
from proxy.routes.mount import mount
from proxy.services import make_services
from proxy.settings import load_settings
from proxy.turn.services import Services
from proxy.types import Scope

log = logging.getLogger("tokenproxy")

CONFIG_VARIABLE = "TOKENPROXY_CONFIG"


class TokenProxyPlugin:
    """What the entry point `vllm.endpoint_plugins` resolves to."""

    name = "tokenproxy"
    required_tasks = ("generate",)

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        """`registry` is where counters go: the one whose page vLLM serves."""
        self._registry = registry
        self._engine: InProcessEngine | None = None
        self._gateway: Services | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Mount the routes beside, and where paths are equal in place of, vLLM's own."""
        self._engine = InProcessEngine(inner_app(app))
        mount(app, self._ready_gateway, inside_vllm=True)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Start to ask the engine what it can do; called when it is up."""
        assert self._engine is not None  # vLLM calls attach_router first
        _show_log()
        settings = load_settings(_config_file())
        source = settings.tokenizer or getattr(args, "tokenizer", None)
        template = _template_text(str(settings.chat_template or "") or getattr(args, "chat_template", None))
        trust = settings.trust_remote_code or bool(getattr(args, "trust_remote_code", False))
        revision = getattr(args, "tokenizer_revision", None) or getattr(args, "revision", None)
        tokenizers = Tokenizers(source, template, trust, revision)
        replica = Replica(self._engine, tokenizers, settings.token_in, settings.watch_interval_s)
        fleet = Fleet([replica])
        if settings.store == "memory:" and (getattr(args, "api_server_count", 1) or 1) > 1:
            log.warning(
                "`store` is memory: and there are %d API server processes: a conversation is recognised only "
                "by the process that recorded it", args.api_server_count,
            )  # fmt: skip
        encoders = ThreadPoolExecutor(settings.encoder_threads, "encode")
        gateway = make_services(settings, fleet, encoders, Metrics(self._registry))
        await gateway.rollouts.open()
        fleet.start()
        self._gateway = gateway

    def _ready_gateway(self, scope: Scope) -> Services:
        if self._gateway is None:
            raise EngineUnavailable("vLLM is still starting")
        return self._gateway


def _config_file() -> Path | None:
    value = os.environ.get(CONFIG_VARIABLE)
    return Path(value) if value else None


def _template_text(value: str | None) -> str | None:
    """The template vLLM runs with: it takes a path or the template itself."""
    if value is None:
        return None
    path = Path(value)
    return path.read_text() if "{" not in value and path.is_file() else value


def _show_log() -> None:
    """vLLM configures its own logger only: give ours the same handlers."""
    ours, theirs = logging.getLogger("tokenproxy"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(logging.INFO)
        ours.propagate = False
