"""What the documentation must name: a route, header, reason, status or error code without a word fails."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from prometheus_client import Counter, Histogram
from prometheus_client.metrics import MetricWrapperBase

import tokenization
from proxy import errors
from proxy.dialects.prompt_fields import ALIASES
from proxy.fleet.admin_calls import ADMIN_CALLS
from proxy.history.vocabulary import Problem, Reason, Source
from proxy.metrics import Ids, Metrics, ReplicaState
from proxy.routes.routes import all_routes
from proxy.vllm_plugin import CONFIG_VARIABLE

_ROOT = Path(__file__).parents[2]
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("**/*.md"))]
_OTHER_PAGES = [_ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")]
"""Their links and commands must be right, but what only they mention is not documented."""
_TEXT = "\n".join(page.read_text() for page in _PAGES)
_SOURCES = "\n".join(path.read_text() for path in sorted((_ROOT / "proxy").glob("**/*.py")))
_HEADERS = set(re.findall(r'b"(x-(?:prompt-\w+|session-id|turn-id|request-replayed|request-id))"', _SOURCES))
_MONITORING = (_ROOT / "docs" / "monitoring.md").read_text()
_ACCESS_LOG = {
    next(filter(None, groups))
    for groups in re.findall(
        r'"(\w+)": (?:client|scope|_path|status|round)|fields\["(\w+)"\] = ',
        (_ROOT / "proxy" / "monitoring" / "middleware.py").read_text(),
    )
}
_OTEL_VARIABLES = sorted(set(re.findall(r'"(OTEL_\w+)"', _SOURCES)))
_SPAN_ATTRIBUTES = sorted(
    set(re.findall(r'"(tokenproxy\.[a-z_.]+)"', _SOURCES))
    - {
        "tokenproxy.tenant",
        "tokenproxy.scopes",
        "tokenproxy.exchange",
        "tokenproxy.access",
    }  # keys of the ASGI scope, and a logger
)
_METRICS = {
    metric._name + ("_total" if isinstance(metric, Counter) else ""): metric
    for metric in vars(Metrics()).values()
    if isinstance(metric, MetricWrapperBase) and not metric._labelvalues
}
_BLOCKS = [
    pytest.param(code, id=f"{page.name}-{index}")
    for page in _PAGES
    for index, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


def _say(words: str) -> bool:
    """Whether the pages hold these words, not as a part of a longer one."""
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", _TEXT) is not None


@pytest.mark.parametrize("path", [d.path for d in all_routes() if not d.catches_all])
def test_routes(path: str) -> None:
    assert _say(f"{path}`")


@pytest.mark.parametrize("name", sorted(_HEADERS))
def test_headers(name: str) -> None:
    assert _say(f"`{name.title().replace('-Id', '-ID')}`")


def test_there_are_headers() -> None:
    assert len(_HEADERS) == 9


@pytest.mark.parametrize("name", _METRICS)
def test_metrics(name: str) -> None:
    """A row for each, with its type and its labels."""
    metric = _METRICS[name]
    [row] = [line for line in _MONITORING.splitlines() if line.startswith(f"| `{name}` |")]
    kind, labels = row.split(" | ")[1:3]
    assert kind == type(metric).__name__.lower()
    assert re.findall(r"`(\w+)`", labels) == list(metric._labelnames)


def test_every_metric_of_the_registry_is_looked_at() -> None:
    families = [family.name for family in Metrics().registry.collect()]
    assert sorted(families) == sorted(name.removesuffix("_total") for name in _METRICS)


def test_metrics_that_are_documented_exist() -> None:
    named = set(re.findall(r"`(tokenproxy_\w+)`", _TEXT))
    assert named - set(_METRICS) == set()


@pytest.mark.parametrize("name", _METRICS)
def test_names_of_metrics_end_with_their_unit(name: str) -> None:
    if isinstance(_METRICS[name], Histogram):
        assert name.endswith("_seconds")


@pytest.mark.parametrize("word", [*ReplicaState, *Ids])
def test_values_of_labels(word: str) -> None:
    assert f"`{word}`" in _MONITORING


@pytest.mark.parametrize("name", sorted(_ACCESS_LOG))
def test_fields_of_the_access_log(name: str) -> None:
    assert f"`{name}`" in _MONITORING


def test_there_is_an_access_log() -> None:
    assert {"client", "path", "duration_ms", "added_ms", "client_left"} <= _ACCESS_LOG


@pytest.mark.parametrize("name", _OTEL_VARIABLES)
def test_variables_of_opentelemetry(name: str) -> None:
    assert name in _MONITORING or name.replace("_TRACES_", "_") in _MONITORING


@pytest.mark.parametrize("name", _SPAN_ATTRIBUTES)
def test_attributes_of_spans(name: str) -> None:
    assert f"`{name.replace('tokenproxy.prompt', '')}`" in _MONITORING or f"`{name}`" in _MONITORING


@pytest.mark.parametrize("word", sorted({*Reason, *Source, *Problem}))
def test_values_of_headers(word: str) -> None:
    assert _say(f"`{word}`")


@pytest.mark.parametrize(
    "name", [*ALIASES, "append_messages", "return_token_ids", "required_prefix_token_ids"]
)
def test_fields(name: str) -> None:
    assert _say(f"`{name}`")


@pytest.mark.parametrize(
    "kind",
    [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.ApiError)],
)
def test_statuses(kind: type[errors.ApiError]) -> None:
    assert _say(str(kind.status))


@pytest.mark.parametrize("code", sorted(set(re.findall(r'code="([a-z_]+)"', _SOURCES))))
def test_error_codes(code: str) -> None:
    assert _say(f"`{code}`")


@pytest.mark.parametrize("name", tokenization.__all__)
def test_public_names(name: str) -> None:
    assert _say(name)


@pytest.mark.parametrize("name", ["TOKENPROXY_...", CONFIG_VARIABLE])
def test_variables(name: str) -> None:
    assert _say(name)


@pytest.mark.parametrize("code", _BLOCKS)
def test_python_in_the_pages(code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module == "tokenization":
            assert {alias.name for alias in node.names} <= set(tokenization.__all__)


every_page = pytest.mark.parametrize(
    "page", [*_PAGES, *_OTHER_PAGES], ids=lambda page: str(page.relative_to(_ROOT))
)


@every_page
def test_commands_of_make_exist(page: Path) -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", (_ROOT / "Makefile").read_text()))
    commands = re.findall(r"(?:`|\$ )make ((?:[a-z-]+ ?)+)", page.read_text())
    assert {word for command in commands for word in command.split()} <= targets


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_table_of_admin_calls() -> None:
    """The same rows as in the code, in the same order."""
    page = (_ROOT / "docs" / "weights.md").read_text()
    row = r"^\| `(\w+) (/\S+)` \| (\w+)[^|]*?(?:`(\w+)`)? \| (stays|leaves) \|"
    rows = re.findall(row, page, re.MULTILINE)
    assert rows == [
        (call.method, call.path, str(call.join), call.field, "leaves" if call.leaves else "stays")
        for call in ADMIN_CALLS
    ]
