"""The benchmarks run in small, and print the rows and columns that the docs print.

Their numbers are not checked: they need an idle machine. The parts that figures rest on are checked by
arithmetic: the model of an engine, the plan, and the language that engines render.
"""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import SUITES, choose, suite
from benchmarks.engine_model import BLOCK_IDS, EngineModel, Job, PrefixCache, Speed
from benchmarks.loads import NUMBER, STEP, Load
from benchmarks.measure import Cell, Sample
from benchmarks.peers import PEERS
from benchmarks.plan import Assumptions, Costs, Curve, Planner, interpolate, read_costs
from benchmarks.texts import Words
from chat_tokenizer import ChatTokenizer
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


def test_added_time_is_a_percentile_minus_the_direct_median_and_rounds_have_a_median() -> None:
    rounds = [Sample(rate, 1.0, 1.0, 2.0, 0.0, 0.0, 1.0) for rate in (30.0, 270.0, 15.0)]
    cell = Cell([1.0, 2.0, 9.0], [3.0, 5.0, 20.0], rounds)
    assert (cell.added(), cell.added(0.99), cell.median("per_second")) == (3.0, 18.0, 30.0)


def test_each_step_of_a_conversation_has_the_numbers_of_its_position() -> None:
    load = Load("a", "/", f"<{NUMBER}".encode(), b">", f",{NUMBER}.{STEP}".encode(), conversations=10)
    assert load.body(3) == b"<1000003>"
    assert load.body(23) == b"<1000003,1000003.1000001,1000003.1000002>"


def test_words_render_as_their_tokenizer_does(tmp_path: Path) -> None:
    """Engines render with `Words`, the proxy with the tokenizer that it wrote."""
    words, draw = Words(), random.Random(1)
    words.write(tmp_path)
    answer = words.sample(draw, 40)
    opening: list[dict[str, Any]] = [{"role": "system", "content": words.text(draw, 20)}]
    whole = [*opening, answer.message, {"role": "tool", "tool_call_id": "c", "content": words.text(draw, 50)}]
    tokenizer = ChatTokenizer.load(str(tmp_path))
    assert list(words.render(whole)) == tokenizer.render(whole)
    prompt = tokenizer.render(opening)
    assert tokenizer.render(whole)[: len(prompt) + len(answer.ids)] == [*prompt, *answer.ids]


_SPEED = Speed(1000, 100, half=1, during_prefill=0.5, running=2, capacity_ids=8 * BLOCK_IDS)


def _job(name: str, prompt_ids: int, completion_ids: int) -> Job:
    blocks = (prompt_ids + completion_ids) // BLOCK_IDS
    return Job([(name, number) for number in range(blocks)], prompt_ids, completion_ids)


def _ends(engine: EngineModel) -> list[tuple[float, Job]]:
    """Let time pass until nothing runs; the requests with the times at which they ended."""
    ended = []
    while (change := engine.next_change()) is not None:
        ended += [(change, job) for job in engine.advance(change)]
    return ended


def test_engine_prefills_what_is_not_cached_and_decodes_with_a_shared_speed() -> None:
    engine = EngineModel(_SPEED)
    engine.submit(0.0, _job("a", 3 * BLOCK_IDS, BLOCK_IDS))
    ((first, _),) = _ends(engine)
    assert first == pytest.approx(3 * BLOCK_IDS / 1000 + BLOCK_IDS / (100 / 2))
    engine.submit(first, _job("a", 4 * BLOCK_IDS + 100, 10))
    ((second, job),) = _ends(engine)
    assert job.cached_ids == engine.totals.cached_ids == 4 * BLOCK_IDS
    assert second - first == pytest.approx(100 / 1000 + 10 / (100 / 2))


def test_cache_evicts_the_least_recently_used_blocks_and_none_in_use() -> None:
    cache = PrefixCache(4 * BLOCK_IDS)
    cache.hold(["a0", "a1"])
    cache.release(["a0", "a1"])
    cache.hold(["b0", "b1"])
    cache.hold(["c0"])
    assert cache.cached_blocks(["a0", "a1"]) == 1  # the end went first
    assert not cache.fits(["d0", "d1"])


def test_plan_has_processes_for_the_cpu_of_its_turns_and_limits_in_their_order() -> None:
    values = dict.fromkeys(read_costs().whole, 0.0) | {"proxy_ms": 2.0, "redis_ms": 0.1}
    values |= {"aof_bytes": 1.0, "client_bytes": 1.0}
    flat = {name: Curve(((1, value), (2, value)), ((1, value), (2, value))) for name, value in values.items()}
    planner = Planner(Assumptions(turns=5, think_s=1.0), Costs(flat, flat, search_ms=0.01, probe_ms=0.1))
    needs = planner.needs(20_000)
    watching = needs.engines * 0.1e-3 / 5
    assert needs.processes == pytest.approx(needs.turns_per_s * 2e-3 / (0.7 - watching), abs=1)
    assert [at for _, at, _ in planner.limits()] == sorted(at for _, at, _ in planner.limits())


def test_costs_are_straight_lines_between_and_beyond_the_measurements() -> None:
    points = ((1000.0, 2.0), (8000.0, 9.0), (32_000.0, 33.0))
    assert [interpolate(points, at) for at in (500, 4500, 8000, 40_000)] == [1.5, 5.5, 9.0, 41.0]
    curve = Curve(first=((1000, 3.0), (2000, 5.0)), later=((1000, 2.0), (2000, 3.0)), per_completion_id=0.01)
    assert curve.of(1500, Assumptions(completion=300), first=True) == pytest.approx(4 + 1)
    assert curve.of(1500, Assumptions(appended=600), first=False) == pytest.approx(2.5 + 200 * 0.001)
