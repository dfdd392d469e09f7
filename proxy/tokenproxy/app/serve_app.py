"""The proxy as an application of Ray Serve: wiring only.

    serve run tokenproxy.app.serve_app:build replicas=2 \\
        upstreams=http://10.0.0.11:8000 store=redis://10.0.0.10:6379/0

Ray Serve places the replicas of the proxy on the nodes of a cluster, scales them by their running requests,
and starts again those that end. A replica keeps nothing that the store does not have, so any of them can
continue any conversation. docs/ray.md describes it.
"""

import asyncio
import gc
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.util.metrics import Counter, Gauge

from tokenproxy.app.app import add_to_lifespan, check_settings, create_app
from tokenproxy.app.serve_engines import ENGINES, ActorEngines, EngineArguments, read_engines, run_engines
from tokenproxy.app.server import GC_THRESHOLDS, raise_file_limit
from tokenproxy.base.tasks import end_tasks, repeat
from tokenproxy.base.types import ASGIApp, Message, Receive, Scope, Send
from tokenproxy.monitoring.logs import configure_logs
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.settings import ENV_PREFIX, Settings, SettingsError, load_settings

_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
"""Requests with the same `X-Session-ID` go to the same replica while it takes them."""
_EVERY_ADDRESS = "0.0.0.0"
"""Clients reach a replica through Ray Serve, at an address that the replica does not know."""
_SERVED_BY_RAY = frozenset(
    {
        "host",
        "port",
        "workers",
        "tls_cert",
        "tls_key",
        "stop_delay_s",
    }
)
_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]*@|[?&](\w*_)?password=")
_CUT_S = 10.0
"""Seconds that Ray Serve waits beyond `drain_s` before it kills a replica."""


class Arguments(BaseModel):
    """The arguments of `build`. All others are settings of the proxy, by their names."""

    model_config = ConfigDict(extra="allow")

    config: Path | None = Field(default=None, description="file with settings, on each node")
    replicas: int = Field(default=1, ge=1, description="replicas of the proxy; the fewest if they are scaled")
    max_replicas: int | None = Field(default=None, ge=1, description="the most replicas; none: no scaling")
    requests_per_replica: int = Field(
        default=64, ge=1, description="running requests per replica that scaling aims at"
    )
    max_ongoing_requests: int = Field(
        default=2048, ge=1, description="requests that run on a replica at once; others wait in Ray Serve"
    )
    cpus: float = Field(default=1.0, ge=0, description="CPUs of a replica")
    engines: EngineArguments | None = Field(default=None, description="engines that Ray Serve runs, too")

    _read_engines = field_validator("engines", mode="before")(read_engines)

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> "Arguments":
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}, less than replicas, {self.replicas}")
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """The settings among the arguments."""
        return dict(self.model_extra or {})


class Proxy:
    """One replica of the proxy. `serve.ingress` adds what makes it answer requests."""

    def __init__(self, *engines: Any) -> None:
        """`engines`: those of the same application, which are found by their name."""


def build(arguments: Arguments) -> Application:
    """The application of `serve run tokenproxy.app.serve_app:build NAME=VALUE ...`, or of a file's `args`.

    Raises:
        SettingsError: an argument is no setting, a wrong one, or a secret, which Ray would show.
    """
    settings = _load(arguments)
    options: dict[str, Any] = {"num_replicas": arguments.replicas}
    if arguments.max_replicas is not None:
        scaling = AutoscalingConfig(
            min_replicas=arguments.replicas,
            max_replicas=arguments.max_replicas,
            target_ongoing_requests=arguments.requests_per_replica,
        )
        options = {"autoscaling_config": scaling}
    deployment = serve.deployment(
        serve.ingress(_app_maker(arguments))(Proxy),
        name="Proxy",
        max_ongoing_requests=arguments.max_ongoing_requests,
        graceful_shutdown_timeout_s=settings.drain_s + _CUT_S,
        ray_actor_options={"num_cpus": arguments.cpus},
        **_routing(),
        **options,
    )
    engines = [run_engines(arguments.engines)] if arguments.engines else []
    return deployment.bind(*engines)


def _routing() -> dict[str, Any]:
    """Options of the deployment. Where HAProxy chooses the replicas, Ray Serve refuses a router."""
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        return {}
    return {"request_router_config": RequestRouterConfig(request_router_class=_ROUTER)}


def _app_maker(arguments: Arguments) -> Callable[[], FastAPI]:
    """A function that creates the application in a replica, where settings may come from its environment."""

    def make_app() -> FastAPI:
        settings = _load(arguments)
        configure_logs(settings.log_level, settings.log_format)
        raise_file_limit()
        gc.set_threshold(*GC_THRESHOLDS)
        metrics = Metrics()
        app = create_app(settings, metrics=metrics, resolve=ActorEngines().resolve)
        add_to_lifespan(app, lambda: exported(metrics.registry))
        app.add_middleware(_WithoutRequestId)
        return app

    return make_app


class _WithoutRequestId:
    """Drops `X-Request-ID` from answers: Ray Serve adds it, with the id that it gave to the request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [header for header in message["headers"] if header[0].lower() != b"x-request-id"]
                message = {**message, "headers": kept}
            await send(message)

        await self._app(scope, receive, without_id)


def _load(arguments: Arguments) -> Settings:
    """The settings of a replica.

    Raises:
        SettingsError: an argument is no setting, a wrong one, or a secret.
    """
    given = arguments.settings
    for name, value in given.items():
        _check(name, value)
    if arguments.engines is not None:
        given.setdefault("upstreams", ENGINES)
    given["host"] = _EVERY_ADDRESS
    settings = load_settings(arguments.config, **given)
    if settings.tls_cert is not None:
        raise SettingsError("tls_cert: Ray Serve has the server, and speaks plain HTTP: put TLS before it")
    if not settings.upstreams and settings.upstreams_file is None:
        raise SettingsError(
            "no engine: name some with upstreams=URL, or let Ray Serve run some with engines=JSON"
        )
    check_settings(settings, arguments.max_replicas or arguments.replicas)
    return settings


def _check(name: str, value: object) -> None:
    field = Settings.model_fields.get(name)
    if field is None:
        known = ", ".join(sorted([*Arguments.model_fields, *Settings.model_fields]))
        raise SettingsError(f"{name!r} is neither an argument nor a setting. There are: {known}")
    if name in _SERVED_BY_RAY:
        raise SettingsError(f"{name}: Ray Serve has the server here; see `http_options` of its config file")
    secret = SecretStr in (field.annotation, *get_args(field.annotation))
    if secret or (name in ("store", "upstreams") and _holds_password(value)):
        raise SettingsError(
            f"{name}: Ray's dashboard shows arguments: set {ENV_PREFIX}{name.upper()} in the environment of "
            "`ray start` on each node"
        )


def _holds_password(value: object) -> bool:
    urls = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return _PASSWORD.search(urls) is not None


_PREFIX = "tokenproxy_"
_EVERY_S = 5.0


class RayMetrics:
    """Passes the values of one registry to Ray."""

    def __init__(self, registry: Collector | CollectorRegistry) -> None:
        self._registry = registry
        self._metrics: dict[str, Counter | Gauge] = {}
        self._passed: dict[tuple[str, tuple[str, ...]], float] = {}
        """What was passed of counters."""

    def update(self) -> None:
        """Pass what changed.

        Ray adds `_total` to the names of counters and cannot take buckets as they are, so the samples of a
        histogram are passed as gauges: their names stay, and `rate` and `histogram_quantile` need no more.
        """
        for family in self._registry.collect():
            if not family.name.startswith(_PREFIX):
                continue
            kind = Counter if family.type == "counter" else Gauge
            for sample in family.samples:
                name, names, tags = sample.name, tuple(sorted(sample.labels)), dict(sample.labels)
                key = name, tuple(tags[each] for each in names)
                growth = sample.value - self._passed.get(key, 0.0)
                if name.endswith("_created") or (kind is Counter and growth <= 0):
                    continue
                if name not in self._metrics:
                    self._metrics[name] = kind(name, family.documentation, names)
                if kind is Counter:
                    self._metrics[name].inc(growth, tags=tags)
                    self._passed[key] = sample.value
                else:
                    self._metrics[name].set(sample.value, tags=tags)


@asynccontextmanager
async def exported(registry: Collector | CollectorRegistry) -> AsyncIterator[None]:
    """Pass the values of a registry to Ray again and again, and once more at the end."""
    metrics = RayMetrics(registry)

    async def update() -> None:
        await asyncio.sleep(_EVERY_S)
        metrics.update()

    task = asyncio.create_task(repeat(update, "the metrics could not be passed to Ray"))
    try:
        yield
    finally:
        await end_tasks(task)
        metrics.update()
