"""The benchmarks run from start to end. Their numbers are not checked: they need an idle machine."""

import json
from pathlib import Path

import pytest

from benchmarks.append_report import LENGTHS
from benchmarks.cases import cases
from benchmarks.clocked import INSIDE, REQUEST, STAGES, read_clocks
from benchmarks.proofs import prove_all, read_templates
from benchmarks.report import Measured, Times, turns_json, turns_text
from benchmarks.ways import WAYS
from tests.campaign.benchmark_commands import linux, run_benchmark
from tokenization.locality import Locality


@pytest.mark.slow
@linux
def test_quick_run_prints_and_writes_every_case(tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    run = run_benchmark("benchmarks/overhead.py", "--quick", "--json", str(written))
    assert run.returncode == 0, run.stderr
    for case in cases():
        assert f"| {case.name} " in run.stdout
    measured = json.loads(written.read_text())["cases"]
    assert [case["name"] for case in measured] == [case.name for case in cases()]
    assert all(case["proxy"]["requests"] > 0 for case in measured)


@pytest.mark.slow
@linux
def test_quick_run_measures_each_number_of_workers(tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    run = run_benchmark("benchmarks/workers.py", "--quick", "--workers", "1", "2", "--json", str(written))
    assert run.returncode == 0, run.stderr
    rows = json.loads(written.read_text())["rows"]
    assert [row["workers"] for row in rows] == [1, 2]
    assert all(row["rate"]["requests"] > 0 and row["cpu_ms_per_request"] > 0 for row in rows)
    assert "| 2 " in run.stdout


def test_unknown_case_error_lists_the_case_names() -> None:
    run = run_benchmark("benchmarks/overhead.py", "--case", "no such", timeout_s=60)
    assert run.returncode == 2
    assert '"small chat"' in run.stderr


@pytest.mark.slow
@linux
@pytest.mark.timeout(300)
def test_quick_conversation_run_times_every_state_and_stage(tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    arguments = ["--quick", "--store", "SQLite", "--json", str(written)]
    run = run_benchmark("benchmarks/transparent.py", *arguments, timeout_s=280, torch=True)
    assert run.returncode == 0, run.stderr
    assert "| SQLite, other process " in run.stdout
    rows = json.loads(written.read_text())["rows"]
    assert [row["state"] for row in rows] == ["same process", "other process", "restarted"]
    for row in rows:
        for stages in row["samples"]["stages_ms"].values():
            assert all(all(stages[stage]) for stage in STAGES), row["state"]


@pytest.mark.slow
@linux
def test_quick_append_run_times_every_way_at_every_length(tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    run = run_benchmark("benchmarks/append.py", "--quick", "--json", str(written), torch=True)
    assert run.returncode == 0, run.stderr
    measured = json.loads(written.read_text())["samples"]["ms"]
    names = [way.name for way in WAYS] + ["append, first of its thread", "render", "text, not local"]
    assert list(measured) == names
    assert all(f"| {name} " in run.stdout for name in names)
    assert all(measured[name][str(length)] for name in names for length in LENGTHS)


@linux
def test_quick_proof_run_times_each_template_of_trl_and_a_folder(tmp_path: Path) -> None:
    folder, written = tmp_path / "templates", tmp_path / "out.json"
    folder.mkdir()
    source = "{% for m in messages %}{{ loop.index ~ m.role ~ m.content }}<|im_end|>\n{% endfor %}"
    for name in ("numbered", "the same"):
        (folder / f"{name}.jinja").write_text(source)
    assert [name for name, text in read_templates(folder).items() if text == source] == ["numbered"]
    run = run_benchmark("benchmarks/proofs.py", str(folder), "--quick", "--json", str(written))
    assert run.returncode == 0, run.stderr
    proofs = json.loads(written.read_text())["proofs"]
    assert all(proof["cpu_s"] > 0 for proof in proofs.values())
    assert f"| {len(proofs)} templates " in run.stdout
    assert all(name in run.stdout for name in proofs)


def test_template_that_numbers_messages_is_not_local(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ loop.index ~ m.role ~ m.content }}<|im_end|>\n{% endfor %}"
    (timed,) = prove_all({"numbered": source})
    assert timed.proof.after_messages is Locality.HISTORY
    assert timed.cpu_s > 0


def test_missing_template_folder_is_an_error(tmp_path: Path) -> None:
    run = run_benchmark("benchmarks/proofs.py", str(tmp_path / "missing"), timeout_s=60)
    assert run.returncode == 2
    assert "is not a folder" in run.stderr


def test_every_timed_stage_exists(tmp_path: Path) -> None:
    run = run_benchmark("-m", "benchmarks.clocked", str(tmp_path / "clocks"), "--version")
    assert run.returncode == 0, run.stderr
    assert read_clocks(tmp_path / "clocks") == []


def test_stages_are_assigned_to_requests_by_time() -> None:
    ms = 1_000_000
    times = Times("memory", "")
    times.windows[1000] = [(10 * ms, 20 * ms)]
    mine = [("match", 11 * ms, 13 * ms), (REQUEST, 10 * ms, 19 * ms), ("append", 25 * ms, 26 * ms)]
    other = [("match", 31 * ms, 38 * ms), (REQUEST, 30 * ms, 39 * ms)]
    times.add_stages([mine, other])
    assert (times.stage("match", 1000), times.stage("append", 1000)) == (2.0, 0.0)
    assert times.stage("the rest", 1000) == 8.0


def test_growth_and_gain_are_ratios_of_added_time() -> None:
    measured = Measured([1000, 4000])
    times = Times("memory", "")
    for length, added in ((1000, 2.0), (4000, 8.0)):
        times.direct_ms[length], times.proxy_ms[length] = [1.0], [1.0 + added]
        times.tokens[length] = [length]
        times.stages[length] = {stage: [0.5] for stage in (*STAGES, *INSIDE)}
        measured.render[length] = [length / 100]
    measured.rows = [times]
    assert (measured.growth(times), measured.gain(times, 4000)) == (4.0, 5.0)
    about = {"cores": "2", "cpu": "some", "others": "1%", "python": "3", "libraries": ""}
    assert "MISSED" in turns_text(measured, about)
    assert turns_json(measured, about)["rows"][0]["met"] is False
