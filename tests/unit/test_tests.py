"""Rules that keep tests from failing by chance, held by reading the tests' own syntax trees.

A test of `make test` asserts no upper bound on wall time, sleeps for at most 50 ms, and uses no port that was
closed before. The campaign measures and waits on purpose, so only its engines are looked at.
"""

import ast
import re
import runpy
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
_CLOCKS = {"monotonic", "perf_counter", "process_time", "elapsed", "total_seconds"}
_LONGEST_SLEEP_S = 0.05
_LAYERS = ("unit", "contract", "acceptance", "support")


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _name(node: ast.AST) -> str:
    return getattr(node, "attr", "") or getattr(node, "id", "")


def _reads_clock(node: ast.AST, names: set[str]) -> bool:
    """Whether a duration is in it. A time of day alone is none, but what is subtracted from one is."""
    return any(
        (isinstance(part, ast.Call) and _name(part.func) in _CLOCKS)
        or (
            isinstance(part, ast.BinOp)
            and isinstance(part.op, ast.Sub)
            and "time" in [_name(getattr(s, "func", s)) for s in (part.left, part.right)]
        )
        or (isinstance(part, ast.Attribute) and part.attr == "elapsed")
        or (isinstance(part, ast.Name) and part.id in names)
        for part in ast.walk(node)
    )


def _bounds_on_time(function: ast.AST) -> Iterator[int]:
    names = {
        _name(target)
        for part in ast.walk(function)
        if isinstance(part, ast.Assign) and _reads_clock(part.value, set())
        for target in part.targets
    } - {""}
    for part in ast.walk(function):
        if isinstance(part, ast.Assert):
            for compared in ast.walk(part.test):
                if isinstance(compared, ast.Compare) and _bounded(compared, names):
                    yield part.lineno


def _bounded(compared: ast.Compare, names: set[str]) -> bool:
    sides = [compared.left, *compared.comparators]
    return any(
        _reads_clock(smaller, names)
        for (left, right), operator in zip(pairwise(sides), compared.ops, strict=True)
        for smaller in ([left] if isinstance(operator, ast.Lt | ast.LtE) else [])
        + ([right] if isinstance(operator, ast.Gt | ast.GtE) else [])
    )


def _long_sleeps(tree: ast.AST) -> Iterator[int]:
    for part in ast.walk(tree):
        if isinstance(part, ast.Call) and _name(part.func) == "sleep" and part.args:
            length = part.args[0]
            if isinstance(length, ast.Constant) and float(str(length.value)) > _LONGEST_SLEEP_S:
                yield part.lineno


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """The text of each test file, by its path below tests/."""
    return {str(file.relative_to(_TESTS)): file.read_text() for file in sorted(_TESTS.rglob("*.py"))}


@pytest.fixture
def quick(texts: dict[str, str]) -> dict[str, str]:
    """Those of the layers of `make test`."""
    return {name: text for name, text in texts.items() if name.partition("/")[0] in _LAYERS}


def test_no_assertion_bounds_wall_time(quick: dict[str, str]) -> None:
    found = {}
    for name, text in quick.items():
        if any(word in text for word in ("time", *_CLOCKS)) and "assert" in text:
            functions = [part for part in ast.walk(ast.parse(text)) if isinstance(part, _FUNCTIONS)]
            found[name] = sorted({line for function in functions for line in _bounds_on_time(function)})
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_no_sleep_is_longer_than_50_ms(quick: dict[str, str]) -> None:
    found = {name: list(_long_sleeps(ast.parse(text))) for name, text in quick.items() if "sleep" in text}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_no_port_is_closed_before_it_is_used(quick: dict[str, str]) -> None:
    """`tests.support.ports.held_port` keeps a port bound."""
    users = {name for name, text in quick.items() if re.search(r"import .*\bfree_port\b", text)}
    assert users == {"unit/test_children.py"}


def test_every_long_test_is_in_a_part_of_the_campaign() -> None:
    campaign = runpy.run_path(str(_TESTS.parent / "scripts" / "campaign"))
    parts = [path for part in campaign["PARTS"].values() for path in part.paths]
    files = [
        file.relative_to(_TESTS)
        for folder in ("campaign", "mutants")
        for file in (_TESTS / folder).rglob("test_*.py")
    ]
    assert [file for file in files if sum(file.is_relative_to(path) for path in parts) != 1] == []


def test_engines_are_started_in_one_place(texts: dict[str, str]) -> None:
    calls = {name for name, text in texts.items() if re.search(r"\bEngineProcess\(", text)}
    assert calls == {"acceptance/conftest.py"}
