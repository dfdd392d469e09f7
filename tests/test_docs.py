"""What the documentation must name: a route, header, reason, status or error code without a word fails."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import tokenization
from proxy import errors
from proxy.dialects.prompt_fields import ALIASES
from proxy.history.vocabulary import Problem, Reason, Source
from proxy.metrics import Metrics
from proxy.routes.routes import all_routes
from proxy.vllm_plugin import CONFIG_VARIABLE

_ROOT = Path(__file__).parents[1]
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("**/*.md"))]
_OTHER_PAGES = [_ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")]
"""Their links and commands must be right, but what only they mention is not documented."""
_TEXT = "\n".join(page.read_text() for page in _PAGES)
_SOURCES = "\n".join(path.read_text() for path in sorted((_ROOT / "proxy").glob("**/*.py")))
_HEADERS = set(re.findall(r'b"(x-(?:prompt-\w+|session-id|turn-id|request-replayed))"', _SOURCES))
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
    assert len(_HEADERS) == 8


@pytest.mark.parametrize("family", [family.name for family in Metrics().registry.collect()])
def test_counters(family: str) -> None:
    assert _say(f"`{family}_total`")


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
