import asyncio
import io
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet
import pytest

from proxy.cli import main
from proxy.history.store import Limits, Session, Store, StoreError
from proxy.history.turn import Turn
from proxy.samples import export as module
from proxy.samples.export import JsonLines, Parquet, ParquetMissing, Report, UnknownSession, export, table
from proxy.samples.layouts import LAYOUTS
from proxy.samples.samples import samples_of
from proxy.stores.memory import MemoryStore
from proxy.stores.sqlite import SqliteStore
from proxy.stores.urls import make_store
from tests.samples.trees import child, root

Capture = pytest.CaptureFixture[str]


def _rollout(name: str) -> list[Turn]:
    """Two branches, and a third that is refused."""
    a = root(f"{name}-a", [1, 2], [3, 4], rollout=name)
    b = child(f"{name}-b", a, [5], [6], rollout=name)
    c = child(f"{name}-c", a, [5], [7], rollout=name)
    return [a, b, c, child(f"{name}-d", a, [5], [8], rollout=name, logprobs=b"")]


async def _fill(store: Store, names: Iterable[str]) -> None:
    for name in names:
        turns = _rollout(name)
        await store.add(turns, [[b""]] * len(turns))


async def _filled(names: Iterable[str]) -> MemoryStore:
    store = MemoryStore(Limits())
    await _fill(store, names)
    return store


class _Paged:
    """Sessions alone, with the times that are given; somebody uses one while they are read."""

    def __init__(self, used: dict[str, float], moves: dict[int, str]) -> None:
        self._used = used
        self._moves = moves
        self.pages = 0

    async def sessions(self, *, limit: int, before: float | None = None) -> list[Session]:
        if self.pages in self._moves:
            self._used[self._moves[self.pages]] = 1000.0 + self.pages
        self.pages += 1
        earlier = [name for name, used in self._used.items() if before is None or used < before]
        latest = sorted(earlier, key=lambda name: -self._used[name])[:limit]
        return [Session(id=name, created=1.0, used=self._used[name]) for name in latest]

    async def turns(self, rollout: str) -> list[Turn]:
        return [root(f"{rollout}-a", [1], [2], rollout=rollout)]

    async def rewards(self, rollout: str) -> dict[str, float]:
        return {"": 1.0}


async def _exported(store: Any, **options: Any) -> tuple[list[dict[str, Any]], Report]:
    file = io.BytesIO()
    report = await export(store, JsonLines(file), LAYOUTS["plain"], **options)
    return [json.loads(line) for line in file.getvalue().splitlines()], report


async def test_all_rollouts_of_a_store() -> None:
    store = await _filled(["x", "y"])
    await store.set_rewards("y", {"": 0.5})
    rows, report = await _exported(store)
    assert {(row["rollout"], row["leaf"]) for row in rows} == {
        ("x", "x-b"),
        ("x", "x-c"),
        ("y", "y-b"),
        ("y", "y-c"),
    }
    assert {row["rollout"]: row["reward"] for row in rows} == {"x": None, "y": 0.5}
    assert report == Report(2, 4, 8, 2, Counter({"no_logprobs": 2}))


async def test_rows_are_the_samples() -> None:
    store = await _filled(["x"])
    rows, _ = await _exported(store)
    session = await store.session("x")
    samples = samples_of(await store.turns("x"), {}, session=session).samples
    assert rows == [msgspec.json.decode(msgspec.json.encode(LAYOUTS["plain"].row(s))) for s in samples]


async def test_some_sessions_in_the_order_they_were_named() -> None:
    rows, report = await _exported(await _filled(["x", "y", "z"]), only=["z", "x"])
    assert list(dict.fromkeys(row["rollout"] for row in rows)) == ["z", "x"]
    assert report.rollouts == 2


async def test_an_unknown_session_writes_nothing() -> None:
    file = io.BytesIO()
    with pytest.raises(UnknownSession, match="nobody"):
        await export(await _filled(["x"]), JsonLines(file), LAYOUTS["plain"], only=["x", "nobody"])
    assert file.getvalue() == b""


async def test_shared_turns_in_each() -> None:
    _, once = await _exported(await _filled(["x"]))
    _, each = await _exported(await _filled(["x"]), shared="each")
    assert (once.trained_ids, each.trained_ids) == (4, 6)


async def test_a_session_without_turns_counts_for_nothing() -> None:
    store = MemoryStore(Limits())
    await store.save_session(Session(id="s", created=1.0, used=1.0))
    rows, report = await _exported(store)
    assert (rows, report.rollouts) == ([], 0)


@pytest.mark.parametrize(
    "used",
    [
        {f"s{i}": float(i) for i in range(10)},
        {f"s{i}": float(i // 2) for i in range(10)},
        {f"s{i}": 1.0 for i in range(10)},
    ],
    ids=["apart", "pairs", "all-at-once"],
)
@pytest.mark.parametrize("at_once", [1, 3, 5, 10, 11])
async def test_every_session_once_whatever_the_pages(
    used: dict[str, float], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SESSIONS_AT_ONCE", at_once)
    rows, report = await _exported(_Paged(used, {}))
    assert sorted(row["rollout"] for row in rows) == sorted(used)
    assert report.rollouts == 10


async def test_a_session_used_meanwhile_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SESSIONS_AT_ONCE", 3)
    store = _Paged({f"s{i}": float(i) for i in range(10)}, {1: "s0", 2: "s9"})
    rows, _ = await _exported(store)
    assert sorted(row["rollout"] for row in rows) == sorted(f"s{i}" for i in range(10))


async def test_progress_is_told() -> None:
    told: list[int] = []
    await _exported(await _filled(["x", "y"]), on_rollout=lambda: told.append(1))
    assert len(told) == 2


@pytest.mark.parametrize("name", LAYOUTS)
async def test_parquet_holds_what_json_holds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDS_AT_ONCE", 8)
    store = await _filled(["x", "y"])
    path, lines = tmp_path / "x.parquet", io.BytesIO()
    layout = LAYOUTS[name]
    with path.open("wb") as file:
        await export(store, Parquet(file, layout), layout)
    await export(store, JsonLines(lines), layout)
    read = pyarrow.parquet.ParquetFile(path)
    assert read.metadata.num_row_groups > 1
    nested = [field for field, kind in layout.columns.items() if kind == "json"]
    rows = [{**row, **{field: json.loads(row[field]) for field in nested}} for row in read.read().to_pylist()]
    assert rows == [json.loads(line) for line in lines.getvalue().splitlines()]


def test_parquet_columns_are_typed() -> None:
    file = io.BytesIO()
    Parquet(file, LAYOUTS["plain"]).finish()
    schema = pyarrow.parquet.read_schema(io.BytesIO(file.getvalue()))
    types = {"prompt_ids": "int32", "loss_mask": "int8", "logprobs": "float"}
    assert {name: str(schema.field(name).type.value_type) for name in types} == types
    assert str(schema.field("messages").type) == "string"
    assert str(schema.field("reward").type) == "double"


def test_without_pyarrow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ParquetMissing, match=r"pip install 'tokenproxy\[parquet\]'"):
        Parquet(io.BytesIO(), LAYOUTS["plain"])


def test_the_table() -> None:
    report = Report(3, 4, 10, 1, Counter({"media": 2, "no_logprobs": 1}))
    lines = [line.split(maxsplit=2) for line in table(report, "out.jsonl").splitlines()]
    assert lines[:3] == [
        ["rollouts", "3"],
        ["samples", "4", "to out.jsonl; 10 ids to train on"],
        ["no", "reward", "1  set it, or your trainer finds none"],
    ]
    assert [line[:2] for line in lines[3:]] == [["refused", "3"], ["media", "2"], ["no_logprobs", "1"]]
    assert "no reward" not in table(Report(1, 1, 1), "-")


def test_the_table_of_nothing() -> None:
    assert table(Report(), "x").startswith("nothing to export")


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store on disk with two rollouts."""

    async def fill() -> None:
        store = SqliteStore(tmp_path / "kept.db", Limits())
        await store.open()
        await _fill(store, ["x", "y"])
        await store.aclose()

    asyncio.run(fill())
    return f"sqlite:///{tmp_path / 'kept.db'}"


def test_the_command(url: str, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("older")
    assert main(["export", "--store", url, "--out", str(out)]) == 0
    assert len(out.read_text().splitlines()) == 4
    said = capsys.readouterr()
    assert "no_logprobs" in said.out and str(out) in said.out
    assert said.err == ""
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == ["out.jsonl"]


def test_every_flag_of_the_command(url: str, tmp_path: Path) -> None:
    out = tmp_path / "samples"
    flags = ["--format", "parquet", "--layout", "verl", "--session", "y", "--shared", "each"]
    assert main(["export", "--store", url, "--out", str(out), *flags]) == 0
    rows = pyarrow.parquet.read_table(out).to_pylist()
    assert list(rows[0]) == list(LAYOUTS["verl"].columns)
    assert [row["response_mask"] for row in rows] == [[1, 1, 0, 1], [1, 1, 0, 1]]
    assert {json.loads(row["extra_fields"])["rollout"] for row in rows} == {"y"}


@pytest.mark.parametrize("quiet_s, shown", [(0.0, True), (60.0, False)])
def test_only_a_long_export_shows_progress(
    quiet_s: float, shown: bool, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("proxy.export_command._QUIET_S", quiet_s)
    assert main(["export", "--store", url, "--out", str(tmp_path / "out.jsonl")]) == 0
    assert ("2/2" in capsys.readouterr().err) is shown


def test_the_name_says_the_format(url: str, tmp_path: Path) -> None:
    out = tmp_path / "samples.parquet"
    assert main(["export", "--store", url, "--out", str(out)]) == 0
    assert pyarrow.parquet.read_metadata(out).num_rows == 4


def test_the_store_may_stand_in_the_settings(url: str, tmp_path: Path) -> None:
    config, out = tmp_path / "settings.yaml", tmp_path / "out.jsonl"
    config.write_text(f"store: {url}\n")
    assert main(["export", "--config", str(config), "--out", str(out)]) == 0
    assert len(out.read_text().splitlines()) == 4


def test_stdout_holds_rows_alone(url: str, capsys: Capture) -> None:
    assert main(["export", "--store", url, "--out", "-", "--session", "x"]) == 0
    said = capsys.readouterr()
    assert [json.loads(line)["rollout"] for line in said.out.splitlines()] == ["x", "x"]
    assert "rollouts" in said.err


async def _opened(url: str) -> None:
    store = make_store(url, Limits())
    await store.open()
    await store.aclose()


def test_an_empty_store_gives_an_empty_file(tmp_path: Path, capsys: Capture) -> None:
    out, url = tmp_path / "out.jsonl", f"sqlite:///{tmp_path / 'new.db'}"
    asyncio.run(_opened(url))
    assert main(["export", "--store", url, "--out", str(out)]) == 0
    assert out.read_bytes() == b""
    assert "nothing to export" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--out", "-", "--format", "parquet"], "--out FILE.parquet"),
        (["--out", "OUT", "--session", "nobody"], "nobody"),
        (["--out", "OUT", "--store", "nonsense://x"], "nonsense"),
        (["--out", "OUT", "--store", "sqlite:missing.db"], "missing.db"),
        (["--out", "OUT", "--store", "memory:"], "/v1/sessions/{session}/samples"),
        (["--out", "OUT", "--config", "missing.yaml"], "missing.yaml"),
    ],
)
def test_wrong_use_is_said_in_one_line(
    flags: list[str], words: str, url: str, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["export", "--store", url, *[str(out) if flag == "OUT" else flag for flag in flags]]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("tokenproxy: ") and words in line
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


def test_a_pipe_is_not_replaced_by_a_file(url: str, tmp_path: Path, capsys: Capture) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(["export", "--store", url, "--out", str(pipe)]) == 2
    assert "--out -" in capsys.readouterr().err
    assert pipe.is_fifo()


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("error", [StoreError("the store is gone"), OSError("the disk is full")])
def test_what_fails_half_way_leaves_the_older_file(
    error: Exception,
    suffix: str,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    out = tmp_path / f"out.{suffix}"
    out.write_text("older")
    rewards = SqliteStore.rewards

    async def fail(store: SqliteStore, rollout: str) -> dict[str, float]:
        if rollout == "x":  # the older one: the second to be read
            raise error
        return await rewards(store, rollout)

    monkeypatch.setattr(SqliteStore, "rewards", fail)
    assert main(["export", "--store", url, "--out", str(out)]) == 1
    assert capsys.readouterr().err == f"tokenproxy: {error}\n"
    assert out.read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == [out.name]


def test_a_reader_that_leaves_early_is_no_error(url: str) -> None:
    command = [sys.executable, "-m", "proxy.cli", "export", "--store", url, "--out", "-"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_help_teaches(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["export", "--help"])
    assert exited.value.code == 0
    text = capsys.readouterr().out
    assert [
        word for word in [*LAYOUTS, "--shared", "--session ID", "sqlite:", "Exit code"] if word not in text
    ] == []
