"""The arguments of the Ray Serve application, its metrics, and its child processes; no cluster is needed."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from pydantic import ValidationError

from tokenproxy.settings import SettingsError

pytest.importorskip("ray", reason="scripts/install-programs ray installs it")

from ray.exceptions import ActorUnavailableError

from tokenproxy.app import serve_app, serve_engines
from tokenproxy.app.serve_app import Arguments, build
from tokenproxy.app.serve_engines import ActorEngines, EngineArguments

_ROOT = Path(__file__).parents[3]
_URL = {"upstreams": "http://127.0.0.1:8000,http://127.0.0.1:8001"}
_SHARED = {"store": "redis://127.0.0.1:6379/0"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"upstream": "http://a:8000"}, "'upstream' is neither an argument nor a setting."),
        ({"api_key": "k", **_URL}, "api_key: Ray's dashboard shows arguments: set TOKENPROXY_API_KEY in"),
        ({"store": "redis://:p@h:6379/0", **_URL}, "set TOKENPROXY_STORE in"),
        ({"upstreams": ["http://a:8000", "http://user:p@h:8000"]}, "set TOKENPROXY_UPSTREAMS in"),
        ({"port": 1, **_URL}, "port: Ray Serve has the server here"),
        ({}, "no engine: name some with upstreams=URL"),
        ({"overflow": "best", **_URL}, "overflow: Input should be"),
        ({"replicas": 2, "store": "memory:", **_URL}, "cannot share turns that `store: memory:` keeps"),
    ],
)
def test_arguments_that_cannot_be_right(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        build(Arguments(**arguments))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "arguments, field",
    [
        ({"replicas": 0}, "replicas"),
        ({"engines": "{"}, "engines\n  Value error, not an object in JSON"),
        ({"engines": {"model": "m", "flags": "--api-key=k"}}, "VLLM_API_KEY"),
    ],
)
def test_arguments_of_a_wrong_kind(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        Arguments(**arguments)


def test_an_engine_key_needs_keys_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Serve may listen on any address."""
    monkeypatch.setenv("TOKENPROXY_UPSTREAM_API_KEY", "engine")
    with pytest.raises(SettingsError, match=r"every client that reaches host 0\.0\.0\.0"):
        build(Arguments(**_URL))
    monkeypatch.setenv("TOKENPROXY_API_KEY", "client")
    build(Arguments(**_URL))


def test_options_of_the_deployment() -> None:
    proxy = build(Arguments(**_URL, **_SHARED, replicas=2, drain_s=50, cpus=0.5))._bound_deployment
    assert (proxy.name, proxy.num_replicas, proxy.max_ongoing_requests) == ("Proxy", 2, 2048)
    config = proxy._deployment_config
    assert config.graceful_shutdown_timeout_s == 60
    assert config.request_router_config.request_router_class.endswith("ConsistentHashRouter")
    assert proxy.ray_actor_options["num_cpus"] == 0.5
    scaled = build(Arguments(**_URL, **_SHARED, replicas=2, max_replicas=5, requests_per_replica=7))
    scaling = scaled._bound_deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 5, 7)


@pytest.mark.parametrize("path", sorted((_ROOT / "deploy/ray").glob("*.yaml")), ids=lambda path: path.name)
def test_the_config_files(path: Path) -> None:
    [application] = yaml.safe_load(path.read_text())["applications"]
    assert application["import_path"] == "tokenproxy.app.serve_app:build"
    built = build(Arguments(**application["args"]))
    assert {each["name"] for each in application.get("deployments", [])} <= {built._bound_deployment.name}


def test_arguments_are_documented() -> None:
    page = (_ROOT / "docs/ray.md").read_text()
    names = [*Arguments.model_fields, *EngineArguments.model_fields]
    assert [name for name in names if f"| `{name}` |" not in page] == []


class _Told:
    """An actor's handle whose method tells `value`, raises it, or waits for what it returns."""

    def __init__(self, value: Any) -> None:
        self.calls = 0
        self._value = value
        self.url = self

    async def remote(self) -> Any:
        self.calls += 1
        if isinstance(self._value, Exception):
            raise self._value
        return await self._value() if callable(self._value) else self._value


@pytest.mark.parametrize(
    "told, found",
    [
        ("http://10.0.0.1:8000/v1/", "http://10.0.0.1:8000"),
        (("10.0.0.1", 8000), "http://10.0.0.1:8000"),
        (("fd00::1", "8000"), "http://[fd00::1]:8000"),
    ],
)
async def test_what_actors_tell(told: Any, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_engines, "_actors", lambda name: {f"{name}0": _Told(told)})
    assert await ActorEngines().resolve("ray-actor://server_") == [found]


@pytest.mark.parametrize(
    "told, problem",
    [
        ("nonsense", "url returns no URL"),
        (ActorUnavailableError("gone for a moment", None), "gone for a moment"),
        (asyncio.Event().wait, "does not answer within"),
        (None, "has no method url"),
    ],
    ids=range(4),
)
async def test_an_actor_that_does_not_tell(
    told: Any, problem: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It counts with what it told before, and others count in any case."""
    monkeypatch.setattr(serve_engines, "_ASK_S", 0.05)
    first, silent = _Told("http://10.0.0.1:8000"), object() if told is None else _Told(told)
    actors: dict[str, Any] = {"server_0": first, "server_1": silent}
    monkeypatch.setattr(serve_engines, "_actors", lambda name: dict(actors))
    engines = ActorEngines()
    assert await engines.resolve("ray-actor://server_") == ["http://10.0.0.1:8000"]
    assert caplog.text.count("the actor server_1 does not tell where its engine is") == 1
    assert problem in caplog.text
    actors["server_0"] = silent
    assert await engines.resolve("ray-actor://server_") == ["http://10.0.0.1:8000"]
    del actors["server_0"]
    assert await engines.resolve("ray-actor://server_") == []
    assert caplog.text.count("the actor server_1 does not tell where its engine is") == 1


def test_tls_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ray Serve would answer without it."""
    for name in ("cert", "key"):
        (tmp_path / name).write_text("")
        monkeypatch.setenv(f"TOKENPROXY_TLS_{name.upper()}", str(tmp_path / name))
    with pytest.raises(SettingsError, match="speaks plain HTTP"):
        build(Arguments(**_URL))


class _Recorder:
    """Stands for Ray's metrics: the last value of a gauge, the sum of a counter, by name and labels."""

    values: dict[tuple[str, frozenset[Any]], float]

    def __init__(self, name: str, text: str, keys: tuple[str, ...]) -> None:
        self._name, self._keys = name, keys

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert tuple(sorted(tags)) == self._keys
        self.values[self._name, frozenset(tags.items())] = value

    def inc(self, value: float, tags: dict[str, str]) -> None:
        key = self._name, frozenset(tags.items())
        self.values[key] = self.values.get(key, 0) + value


def test_metrics_are_passed_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    values = _Recorder.values = {}
    for kind in ("Counter", "Gauge"):
        monkeypatch.setattr(serve_app, kind, _Recorder)
    registry = CollectorRegistry()
    counter = Counter("tokenproxy_turns", "Turns.", ["route"], registry=registry)
    gauge = Gauge("tokenproxy_running", "Requests.", registry=registry)
    histogram = Histogram("tokenproxy_seconds", "Time.", registry=registry, buckets=(1.0,))
    Counter("python_other", "Another.", registry=registry).inc()
    metrics = serve_app.RayMetrics(registry)
    for _ in range(2):
        counter.labels("chat").inc(2)
        gauge.set(5)
        histogram.observe(0.5)
        metrics.update()
    assert values == {
        ("tokenproxy_turns_total", frozenset({("route", "chat")})): 4,
        ("tokenproxy_running", frozenset()): 5,
        ("tokenproxy_seconds_bucket", frozenset({("le", "1.0")})): 2,
        ("tokenproxy_seconds_bucket", frozenset({("le", "+Inf")})): 2,
        ("tokenproxy_seconds_count", frozenset()): 2,
        ("tokenproxy_seconds_sum", frozenset()): 1.0,
    }
