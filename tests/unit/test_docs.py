"""What the documentation must name: a route, header, reason, status or error code without a word fails."""

import ast
import inspect
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import yaml
from prometheus_client import Counter
from prometheus_client.metrics import MetricWrapperBase

import chat_tokenizer
from tokenproxy.app.vllm_plugin import CONFIG_VARIABLE
from tokenproxy.base import errors
from tokenproxy.fleet.admin_calls import ADMIN_CALLS
from tokenproxy.formats.prompt_fields import ALIASES
from tokenproxy.monitoring.metrics import Ids, Metrics, ReplicaState
from tokenproxy.record.vocabulary import Problem, Reason, Source
from tokenproxy.web.routes import all_routes

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
        r'"(\w+)": (?:client|method|path|status|round)|fields\["(\w+)"\] = ',
        (_ROOT / "proxy" / "tokenproxy" / "monitoring" / "exchange.py").read_text(),
    )
}
_METRICS = {
    metric._name + ("_total" if isinstance(metric, Counter) else ""): metric
    for metric in Metrics().registry._collector_to_names
    if isinstance(metric, MetricWrapperBase)
}


def _is_error(kind: object) -> bool:
    return inspect.isclass(kind) and issubclass(kind, errors.ApiError)


_WORDS: dict[str, Sequence[str]] = {
    "routes": [f"{route.path}`" for route in all_routes() if not route.catches_all],
    "headers": [f"`{name.title().replace('-Id', '-ID')}`" for name in sorted(_HEADERS)],
    "values of headers": [f"`{word}`" for word in (*Reason, *Source, *Problem)],
    "fields": [f"`{name}`" for name in (*ALIASES, "append_messages", "required_prefix_token_ids")],
    "statuses": [str(kind.status) for kind in vars(errors).values() if _is_error(kind)],
    "error codes": [f"`{code}`" for code in re.findall(r'code="([a-z_]+)"', _SOURCES)],
    "public names": chat_tokenizer.__all__,
    "variables": ["TOKENPROXY_...", CONFIG_VARIABLE],
    "labels and fields of the log": [f"`{word}`" for word in (*ReplicaState, *Ids, *sorted(_ACCESS_LOG))],
}


def _say(words: str) -> bool:
    """Whether the pages hold these words, not as a part of a longer one."""
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", _TEXT) is not None


@pytest.mark.parametrize("kind", _WORDS)
def test_the_pages_name(kind: str) -> None:
    assert [word for word in _WORDS[kind] if not _say(word)] == []


def test_there_are_headers_and_an_access_log() -> None:
    assert len(_HEADERS) == 9
    assert {"client", "path", "duration_ms", "added_ms", "client_left"} <= _ACCESS_LOG


@pytest.mark.parametrize("name", _METRICS)
def test_metrics(name: str) -> None:
    """A row for each, with its type and its labels."""
    metric = _METRICS[name]
    [row] = [line for line in _MONITORING.splitlines() if line.startswith(f"| `{name}` |")]
    kind, labels = row.split(" | ")[1:3]
    assert kind == type(metric).__name__.lower()
    assert re.findall(r"`(\w+)`", labels) == list(metric._labelnames)


def test_variables_of_opentelemetry() -> None:
    names = set(re.findall(r'"(OTEL_\w+)"', _SOURCES))
    assert {name for name in names if name.replace("_TRACES_", "_") not in _MONITORING} - set(
        re.findall(r"OTEL_\w+", _MONITORING)
    ) == set()


@pytest.mark.parametrize(
    "page", sorted((_ROOT / "docs" / "trainers").glob("*.md")), ids=lambda page: page.stem
)
def test_each_trainers_page_names_the_logprobs_mode(page: Path) -> None:
    assert "--logprobs-mode processed_logprobs" in page.read_text()


def test_python_in_the_pages_imports_public_names() -> None:
    for code in re.findall(r"```python\n(.*?)```", _TEXT, re.DOTALL):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module == "chat_tokenizer":
                assert {alias.name for alias in node.names} <= set(chat_tokenizer.__all__)


@pytest.mark.parametrize("language, read", [("yaml", yaml.safe_load_all), ("toml", tomllib.loads)])
def test_configurations_in_the_pages_can_be_read(
    language: str, read: Callable[[str], Iterable[object]]
) -> None:
    blocks = re.findall(rf"```{language}\n(.*?)```", _TEXT, re.DOTALL)
    assert blocks and all(list(read(block)) for block in blocks)


def test_metrics_that_are_documented_exist() -> None:
    named = set(re.findall(r"`(tokenproxy_\w+)`", _TEXT))
    assert named - set(_METRICS) == set()


every_page = pytest.mark.parametrize(
    "page", [*_PAGES, *_OTHER_PAGES], ids=lambda page: str(page.relative_to(_ROOT))
)


@every_page
def test_commands_of_make_exist(page: Path) -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", (_ROOT / "Makefile").read_text()))
    commands = re.findall(r"(?:`|\$ )make ((?:[a-z-]+ ?)+)", page.read_text())
    assert {word for command in commands for word in command.split()} <= targets


def test_the_table_of_admin_calls() -> None:
    """The same rows as in the code, in the same order."""
    page = (_ROOT / "docs" / "weights.md").read_text()
    row = r"^\| `(\w+) (/\S+)` \| [^|`]*(?:`(\w+)`)? \| (stays|leaves) \|"
    rows = re.findall(row, page, re.MULTILINE)
    assert rows == [
        (call.method, call.path, call.field, "leaves" if call.leaves else "stays") for call in ADMIN_CALLS
    ]
