"""The packages: imports go down their list, never up."""

import ast
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PACKAGES = [
    "proxy.routes",
    "proxy.dialects",
    "proxy.turn",
    "proxy.viewer",
    "proxy.stores",
    "proxy.samples",
    "proxy.history",
    "proxy.fleet",
    "proxy.engine",
    "tokenization",
]
"""From the top; what wires them together stands above all."""
_FOR_ALL = [
    "proxy.dialects.error_formats",
    "proxy.errors",
    "proxy.fields",
    "proxy.folder_lock",
    "proxy.http",
    "proxy.images",
    "proxy.media",
    "proxy.metrics",
    "proxy.monitoring.exchange",
    "proxy.monitoring.middleware",
    "proxy.monitoring.spans",
    "proxy.monitoring.tracing",
    "proxy.types",
    "proxy.urls",
    "proxy.turn.request",
]


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name.startswith(("proxy.", "tokenization"))}


def _is_in(module: str, packages: list[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("rank, package", list(enumerate(_PACKAGES)))
def test_package_imports_only_packages_below_it(rank: int, package: str) -> None:
    files = sorted((_ROOT / package.replace(".", "/")).glob("**/*.py"))
    assert files
    allowed = _PACKAGES[rank:] + ([] if package == "tokenization" else _FOR_ALL)
    upward = {(path.name, name) for path in files for name in _imports(path) if not _is_in(name, allowed)}
    assert upward == set()


@pytest.mark.parametrize("module", _FOR_ALL)
def test_shared_modules_import_no_package(module: str) -> None:
    path = (_ROOT / module.replace(".", "/")).with_suffix(".py")
    allowed = [*_FOR_ALL, "tokenization.messages"]
    assert not [name for name in _imports(path) if not _is_in(name, allowed)]
