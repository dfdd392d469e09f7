"""Dashboard, alerts, Prometheus' configuration and the services fit the metrics that exist."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase

from tokenproxy.monitoring.metrics import Metrics

_ROOT = Path(__file__).parents[2]
_DASHBOARD: dict[str, Any] = json.loads((_ROOT / "config" / "grafana-dashboard.json").read_text())
_EXPRESSIONS = [target["expr"] for panel in _DASHBOARD["panels"] for target in panel["targets"]]
_ALERTS: dict[str, Any] = yaml.safe_load((_ROOT / "config" / "alerts.yml").read_text())
_RULES = [rule for group in _ALERTS["groups"] for rule in group["rules"]]
_COMPOSE: dict[str, Any] = yaml.safe_load((_ROOT / "docker-compose.yml").read_text())
_SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
_OF_PROMETHEUS = {"instance", "job", "le"}
"""Labels that Prometheus or the kind of a metric adds."""


def _families() -> list[Metric]:
    return list(Metrics().registry.collect())


def _series() -> set[str]:
    """The names that Prometheus knows."""
    return {family.name + suffix for family in _families() for suffix in _SUFFIXES[family.type]}


def _labels(series: str) -> set[str]:
    """The labels of a metric, by the name of one of its series."""
    metrics = [each for each in Metrics().registry._collector_to_names if isinstance(each, MetricWrapperBase)]
    [labels] = {
        metric._labelnames
        for metric in metrics
        if series in [metric._name + suffix for suffix in _SUFFIXES[metric._type or ""]]
    }
    return set(labels)


@pytest.mark.parametrize("expression", [*_EXPRESSIONS, *(rule["expr"] for rule in _RULES)])
def test_every_metric_and_label_exists(expression: str) -> None:
    names = set(re.findall(r"tokenproxy_\w+", expression))
    assert names <= _series()
    groups = re.findall(r"by \(([\w, ]+)\)", expression)
    selected = re.findall(r"(\w+)(?:=~|=|!=|!~)\"", expression)
    used = {label.strip() for group in groups for label in group.split(",")} | set(selected)
    assert used - _OF_PROMETHEUS <= set.union(set(), *map(_labels, names))


@pytest.mark.parametrize("rule", _RULES, ids=lambda rule: rule["alert"])
def test_every_alert_leads_to_a_section(rule: dict[str, Any]) -> None:
    page, anchor = rule["annotations"]["docs"].split("#")
    titles = re.findall(r"(?m)^#+ (.+)$", (_ROOT / page).read_text())
    assert anchor in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]


def test_kubernetes_has_the_same_alerts() -> None:
    path = _ROOT / "deploy" / "kubernetes" / "monitoring" / "alerts.yaml"
    assert yaml.safe_load(path.read_text())["spec"] == _ALERTS


def test_every_metric_is_in_the_dashboard() -> None:
    names = [family.name for family in _families()]
    assert [name for name in names if not any(name in expression for expression in _EXPRESSIONS)] == []


def test_prometheus_scrapes_services_that_exist() -> None:
    scrapes = yaml.safe_load((_ROOT / "config" / "prometheus.yml").read_text())["scrape_configs"]
    for discovery in [each for scrape in scrapes for each in scrape["dns_sd_configs"]]:
        for name in discovery["names"]:
            [published] = _COMPOSE["services"][name]["ports"]
            assert published.rpartition(":")[2] == str(discovery["port"])
