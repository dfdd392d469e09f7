"""The benchmarks run in small, and print the rows and columns that the docs print.

Their numbers are not checked: they need an idle machine.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import SUITES, choose, suite
from benchmarks.peers import PEERS
from tests.support.child_environment import python_path_with_torch

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pins processes to cores")
Table = tuple[list[str], list[str]]
"""The columns of a table, and the names of its rows."""


def _run(*arguments: str) -> str:
    """Run Python in the repository; returns what it printed."""
    environment = {**os.environ, "PYTHONPATH": python_path_with_torch()}
    command = [sys.executable, *arguments]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr
    return run.stdout


def _tables(text: str) -> Iterator[Table]:
    """The tables of a Markdown text."""
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        yield lines[0], [line[0] for line in lines[2:]]


def _printed(page: str) -> dict[str, Table]:
    """The tables of a page of the docs, by the head of their first column."""
    return {columns[0]: (columns, rows) for columns, rows in _tables((ROOT / "docs" / page).read_text())}


def _same(printed: Table, measured: Table) -> bool:
    """Whether a table has rows and columns of the docs. A short run has other lengths, and fewer cases."""

    def plain(cells: list[str]) -> list[str]:
        return [re.sub(r"\b\d+k\b", "N", cell) for cell in cells]

    columns = plain(printed[0])
    return all(cell in columns for cell in plain(measured[0])) and set(plain(measured[1])) <= set(
        plain(printed[1])
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("rows", "tables"),
    [
        (["request"], ["added latency", "on one core"]),
        (["workers"], ["workers"]),
        (["append"], ["ms, median, after", "append / text", "event loop, during"]),
        (["turns:SQLite"], ["ms added to a turn"]),
        (["fleet:tokenproxy"], ["policy"]),
        (["soak"], ["third", "aim"]),
        (
            ["gateway:/direct", "gateway:/tokenproxy"],
            ["responses/s on one core", "p99 on 32 connections, ms"],
        ),
    ],
    ids=SUITES,
)
def test_benchmark_prints_the_rows_and_columns_of_the_docs(
    rows: list[str], tables: list[str], tmp_path: Path
) -> None:
    written = tmp_path / "out.json"
    text = _run("-m", "benchmarks", "--quick", "--json", str(written), *rows)
    measured = {columns[0]: (columns, names) for columns, names in _tables(text)}
    printed = _printed("benchmarks.md")
    for name in tables:
        assert _same(printed[name], measured[name]), (printed[name], measured[name])
    assert [each["columns"][0] for each in json.loads(written.read_text())["tables"]] == list(measured)
    assert not re.search(r"\bfailed\b|first error", text), text
    exact = re.findall(r"(\d+\.\d%) \|$|exact \| +(\S+)", text, re.MULTILINE)
    assert {share for shares in exact for share in shares} <= {"", "100.0%"}, text


def test_plan_is_the_one_of_the_docs() -> None:
    assert _run("-m", "benchmarks.plan") in (ROOT / "docs" / "scale.md").read_text()


def test_every_row_is_chosen_by_its_name_and_an_unknown_one_lists_the_names() -> None:
    assert list(choose(["all"])) == list(SUITES)
    for name in SUITES:
        row = suite(name).rows()[-1]
        assert row in choose([f"{name}:{row}"])[name]
    cells = choose(["gateway:1 KB chat/vllm-router"])["gateway"]
    assert cells == ["1 KB chat/vllm-router 0.1.17"]
    with pytest.raises(ValueError, match="small token route"):
        choose(["request:no such"])
    with pytest.raises(ValueError, match="gateway"):
        choose(["no such"])


def test_every_peer_is_installed_in_the_version_of_its_row() -> None:
    scripts = [ROOT / "scripts" / name for name in ("install-peers", "install-vllm-router")]
    text = "\n".join(script.read_text() for script in scripts)
    assert all(peer.name in text and peer.version in text for peer in PEERS)
