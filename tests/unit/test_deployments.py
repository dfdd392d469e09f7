"""Every way to deploy starts the proxy with the same variables and ports, and with settings that exist."""

import re
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
import yaml

from tests.unit.kustomize import compose, name_of
from tokenproxy.app.vllm_plugin import CONFIG_VARIABLE
from tokenproxy.record.store import Limits
from tokenproxy.settings import ENV_PREFIX, Settings, load_settings

_ROOT = Path(__file__).parents[2]
_VARIABLES = {ENV_PREFIX + name.upper() for name in Settings.model_fields} | {CONFIG_VARIABLE}
_COMPOSE: dict[str, Any] = yaml.safe_load((_ROOT / "docker-compose.yml").read_text())
_COMPOSE_PROXIES = ("proxy", "proxy-cpu")
_ENGINE_PORT = 8000
"""vLLM's default."""
_STORE_PORT = 6379
"""Valkey's default."""


class _Proxy(NamedTuple):
    """How one way to deploy starts a proxy: its environment without secrets, and where it listens."""

    variables: dict[str, str]
    port: int


def _in_compose(service: str) -> _Proxy:
    definition = _COMPOSE["services"][service]
    [published] = definition["ports"]
    return _Proxy(definition["environment"], int(published.rpartition(":")[2]))


def _in_kubernetes(overlay: Path) -> _Proxy:
    [deployment] = [each for each in compose(overlay) if name_of(each) == "Deployment/tokenproxy"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    return _Proxy(variables, container["ports"][0]["containerPort"])


def _in_ray(config: Path) -> _Proxy:
    """The arguments that are settings, as the variables that would set them; Ray Serve has the server."""
    content = yaml.safe_load(config.read_text())
    [application] = content["applications"]
    served = content["http_options"]
    settings = {**application["args"], "host": served["host"], "port": served["port"]}
    variables = {
        ENV_PREFIX + name.upper(): ",".join(value) if isinstance(value, list) else str(value)
        for name, value in settings.items()
        if name in Settings.model_fields
    }
    return _Proxy(variables, served["port"])


_PROXIES = {
    **{f"compose {service}": _in_compose(service) for service in _COMPOSE_PROXIES},
    **{
        f"kubernetes {path.name}": _in_kubernetes(path)
        for path in sorted((_ROOT / "deploy/kubernetes/overlays").iterdir())
    },
    "ray serve": _in_ray(_ROOT / "deploy/ray/serve.yaml"),
}
"""By the way to deploy: a further one needs a function as those above, and a line here."""


def test_every_variable_is_a_setting() -> None:
    for path in (_ROOT / "docker-compose.yml", *(_ROOT / "deploy").glob("**/*.y*ml")):
        assert set(re.findall(rf"\b{ENV_PREFIX}[A-Z_]+", path.read_text())) <= _VARIABLES, path


@pytest.mark.parametrize("proxy", _PROXIES.values(), ids=_PROXIES)
def test_the_settings_accept_the_values_and_ports_are_the_same_everywhere(
    proxy: _Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in proxy.variables.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert settings.port == proxy.port == Settings.model_fields["port"].default
    assert settings.host == "0.0.0.0"  # other machines reach it
    [upstream] = proxy.variables[f"{ENV_PREFIX}UPSTREAMS"].split(",")
    store = urlsplit(proxy.variables[f"{ENV_PREFIX}STORE"])
    assert urlsplit(upstream).port == _ENGINE_PORT
    assert (store.scheme, store.hostname, store.port, store.path) == ("redis", "valkey", _STORE_PORT, "/0")


@pytest.mark.parametrize("service", _COMPOSE_PROXIES)
def test_compose_runs_two_proxies_behind_one_name_and_gives_them_time_to_stop(service: str) -> None:
    definition = _COMPOSE["services"][service]
    assert definition["deploy"]["replicas"] == 2
    [published] = definition["ports"]
    first, last = map(int, published.rpartition(":")[0].split("-"))
    assert last - first + 1 == 2
    variables = definition["environment"]
    needed = {urlsplit(variables[f"{ENV_PREFIX}{name}"]).hostname for name in ("STORE", "UPSTREAMS")}
    assert needed == set(definition["depends_on"]) <= set(_COMPOSE["services"])

    grace, settings = definition["stop_grace_period"], Settings()
    # docs/settings.md: starting and stopping
    assert float(grace.removesuffix("s")) >= settings.stop_delay_s + settings.drain_s + 15


def test_the_store_of_compose_evicts_nothing() -> None:
    """The proxies evict whole rollouts; the server would evict parts of them."""
    command = _COMPOSE["services"]["valkey"]["command"]
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    kept = Settings().store_max_bytes + Limits().document_bytes
    assert kept < int(command[command.index("--maxmemory") + 1].removesuffix("gb")) * 2**30
