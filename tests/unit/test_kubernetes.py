"""The manifests in deploy/kubernetes are valid, and agree with the code."""

import re
from pathlib import Path

import kubernetes_validate
import pytest
from prometheus_client import Gauge

from tests.unit.kustomize import Manifest, compose, name_of, read_manifests
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.encoders import MAX_BYTES
from tokenproxy.record.store import Limits
from tokenproxy.settings import Settings
from tokenproxy.web.admin import Health, Ready
from tokenproxy.web.routes import all_routes

_ROOT = Path(__file__).parents[2]
_KUBERNETES = _ROOT / "deploy" / "kubernetes"
_OVERLAYS = sorted(path.name for path in (_KUBERNETES / "overlays").iterdir())
_FOLDERS = sorted(path.parent for path in _KUBERNETES.glob("**/kustomization.yaml"))
_VERSIONS = ["1.30", kubernetes_validate.latest_version()]
"""The oldest that runs the pre-stop hooks (`sleep`), and the newest that the schemas know."""
_WITHOUT_SCHEMA = {"ServiceMonitor", "PrometheusRule"}
"""Kinds of prometheus-operator."""
_UNITS = {"gb": 2**30, "Mi": 2**20, "Gi": 2**30}

every_overlay = pytest.mark.parametrize("overlay", _OVERLAYS)


def _manifests(overlay: str) -> dict[str, Manifest]:
    """By kind and name."""
    manifests = compose(_KUBERNETES / "overlays" / overlay)
    assert len({name_of(each) for each in manifests}) == len(manifests)
    return {name_of(each): each for each in manifests}


def _pods(overlay: str) -> dict[str, Manifest]:
    """The templates of the pods, by kind and name."""
    return {
        name: each["spec"]["template"]
        for name, each in _manifests(overlay).items()
        if each["kind"] in ("Deployment", "StatefulSet")
    }


def _container(pod: Manifest) -> Manifest:
    [container] = pod["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def _values(container: Manifest) -> dict[str, str]:
    """The variables that have values of their own."""
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def _bytes(amount: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(\w+)", amount).groups()  # type: ignore[union-attr]
    return int(number) * _UNITS[unit]


@pytest.mark.parametrize("version", _VERSIONS)
@pytest.mark.parametrize("folder", _FOLDERS, ids=lambda path: str(path.relative_to(_KUBERNETES)))
def test_every_manifest_is_valid(folder: Path, version: str) -> None:
    """Strictly: a field that the schema does not have is an error, too."""
    for manifest in [*compose(folder), *read_manifests(_KUBERNETES / "secret.example.yaml")]:
        if manifest["kind"] not in _WITHOUT_SCHEMA:
            kubernetes_validate.validate(manifest, version, strict=True)


@every_overlay
def test_secrets_have_every_key_that_is_read(overlay: str) -> None:
    secrets = [each for each in _manifests(overlay).values() if each["kind"] == "Secret"]
    [secret] = secrets or read_manifests(_KUBERNETES / "secret.example.yaml")
    pods = _pods(overlay).values()
    variables = [each for pod in pods for each in _container(pod)["env"]]
    references = [each["valueFrom"]["secretKeyRef"] for each in variables if "valueFrom" in each]
    assert {each["name"] for each in references} == {secret["metadata"]["name"]}
    required = {each["key"] for each in references if not each.get("optional")}
    assert required <= set(secret["stringData"]) <= {each["key"] for each in references}
    # the key of the engines is that which the proxies send
    [key] = [each for each in variables if each["name"] == "VLLM_API_KEY"]
    assert key["valueFrom"]["secretKeyRef"]["key"] == "TOKENPROXY_UPSTREAM_API_KEY"


@every_overlay
def test_variables_are_defined_before_they_are_used(overlay: str) -> None:
    """Kubernetes leaves `$(NAME)` as it is if NAME comes later."""
    for pod in _pods(overlay).values():
        assert pod["spec"]["enableServiceLinks"] is False  # a Service `tokenproxy` would set TOKENPROXY_PORT
        names: list[str] = []
        for each in _container(pod)["env"]:
            assert set(re.findall(r"\$\((\w+)\)", each.get("value", ""))) <= set(names)
            names.append(each["name"])
        assert set(re.findall(r"\$\((\w+)\)", " ".join(_container(pod).get("args", ())))) <= set(names)


@every_overlay
def test_ports_are_those_of_services_and_settings(overlay: str) -> None:
    manifests, pods = _manifests(overlay), _pods(overlay)
    ports = {"tokenproxy": Settings().port, "engine": 8000, "valkey": 6379}
    for name, number in ports.items():
        service = manifests[f"Service/{name}"]["spec"]
        [pod] = [each for each in pods.values() if _selects(service["selector"], each)]
        [port], [target] = service["ports"], _container(pod)["ports"]
        assert port["port"] == target["containerPort"] == number
        assert port["targetPort"] == target["name"] == port["name"]
    proxy = _values(_container(pods["Deployment/tokenproxy"]))
    assert proxy["TOKENPROXY_PORT"] == str(ports["tokenproxy"])
    assert f"--port {ports['valkey']}" in _container(pods["StatefulSet/valkey"])["args"]
    assert f"--port={ports['engine']}" in _container(pods["StatefulSet/engine"])["args"]


def _selects(labels: dict[str, str], pod: Manifest) -> bool:
    return bool(labels.items() <= pod["metadata"]["labels"].items())


@every_overlay
def test_probes_use_routes_that_need_no_key(overlay: str) -> None:
    proxy = _container(_pods(overlay)["Deployment/tokenproxy"])
    assert {route.path for route in all_routes()} >= {Health.path, Ready.path}
    assert Health.key_scope is None and Ready.key_scope is None
    engine = _container(_pods(overlay)["StatefulSet/engine"])
    for probe, path in (("startup", Health.path), ("liveness", Health.path), ("readiness", Ready.path)):
        assert proxy[f"{probe}Probe"]["httpGet"] == {"path": path, "port": "http"}
        assert engine[f"{probe}Probe"]["httpGet"] == {"path": "/health", "port": "http"}


@every_overlay
def test_grace_periods_suffice(overlay: str) -> None:
    pods = _pods(overlay)
    proxy, engine = pods["Deployment/tokenproxy"]["spec"], pods["StatefulSet/engine"]["spec"]
    [container] = proxy["containers"]
    values, probe = _values(container), container["readinessProbe"]
    stop_delay_s, drain_s = (float(values[f"TOKENPROXY_{name}"]) for name in ("STOP_DELAY_S", "DRAIN_S"))
    before_stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    # docs/settings.md: starting and stopping
    assert proxy["terminationGracePeriodSeconds"] >= before_stop + stop_delay_s + drain_s + 15
    assert stop_delay_s >= probe["periodSeconds"] * probe["failureThreshold"]
    [container] = engine["containers"]
    before_stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    flags = [arg.partition("=") for arg in container["args"]]
    timeouts = [int(value) for name, _, value in flags if name == "--shutdown-timeout"]
    assert engine["terminationGracePeriodSeconds"] >= before_stop + sum(timeouts) + 15
    assert before_stop >= 30 + Settings().watch_interval_s


@every_overlay
def test_the_store_has_memory_for_what_the_proxies_keep(overlay: str) -> None:
    pods = _pods(overlay)
    store, proxy = _container(pods["StatefulSet/valkey"]), _container(pods["Deployment/tokenproxy"])
    [maxmemory] = [_bytes(each.split()[1]) for each in store["args"] if each.startswith("--maxmemory ")]
    kept = int(_values(proxy)["TOKENPROXY_STORE_MAX_BYTES"]) + Limits().document_bytes
    assert kept < maxmemory < _bytes(store["resources"]["limits"]["memory"])
    assert "--maxmemory-policy noeviction" in store["args"]
    assert _bytes(proxy["resources"]["limits"]["memory"]) / 2 > 2**30 + MAX_BYTES


def test_the_autoscaler_reads_a_gauge_that_exists() -> None:
    manifests = _manifests("many-replicas")
    spec = manifests["HorizontalPodAutoscaler/tokenproxy"]["spec"]
    [metric] = [each["pods"]["metric"]["name"] for each in spec["metrics"] if each["type"] == "Pods"]
    gauges = {
        each._name
        for each in Metrics().registry._collector_to_names
        if isinstance(each, Gauge) and not each._labelnames
    }
    assert metric in gauges
    target = spec["scaleTargetRef"]
    assert "replicas" not in manifests[f"{target['kind']}/{target['name']}"]["spec"]


@every_overlay
def test_administration_reaches_proxies_that_are_not_ready(overlay: str) -> None:
    """After a restart of all engines no proxy is ready, until one gets a weight update."""
    manifests = _manifests(overlay)
    clients, administration = (manifests[f"Service/{name}"] for name in ("tokenproxy", "tokenproxy-admin"))
    assert administration["spec"] == {
        "publishNotReadyAddresses": True,
        "selector": clients["spec"]["selector"],
        "ports": clients["spec"]["ports"],
    }
    assert "publishNotReadyAddresses" not in clients["spec"]


@every_overlay
def test_proxies_and_store_meet_the_restricted_standard(overlay: str) -> None:
    """The Pod Security Standard `restricted`, which many namespaces enforce."""
    for name in ("Deployment/tokenproxy", "StatefulSet/valkey"):
        spec = _pods(overlay)[name]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert all(set(volume) <= {"name", "emptyDir"} for volume in spec.get("volumes", ()))
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"]
            assert context["capabilities"] == {"drop": ["ALL"]}


@every_overlay
def test_policies_admit_the_connections_of_the_fleet(overlay: str) -> None:
    """Proxies reach engines and the store, everybody reaches proxies, and only proxies reach the store."""
    policies = {
        name: each["spec"] for name, each in _manifests(overlay).items() if each["kind"] == "NetworkPolicy"
    }
    proxy = {"app.kubernetes.io/name": "tokenproxy", "app.kubernetes.io/component": "proxy"}
    for name, port in {"engine": 8000, "store": 6379}.items():
        ingress = policies[f"NetworkPolicy/{name}"]["ingress"]
        assert {"podSelector": {"matchLabels": proxy}} in ingress[0]["from"]
        assert ingress[0]["ports"] == [{"port": port}]
        peer = proxy | {"app.kubernetes.io/component": name}
        assert {"to": [{"podSelector": {"matchLabels": peer}}], "ports": [{"port": port}]} in policies[
            "NetworkPolicy/proxy"
        ]["egress"]
    assert policies["NetworkPolicy/store"]["ingress"][0]["from"] == [{"podSelector": {"matchLabels": proxy}}]
    assert len(policies["NetworkPolicy/store"]["ingress"]) == 1
    assert policies["NetworkPolicy/proxy"]["ingress"] == [{"ports": [{"port": Settings().port}]}]
