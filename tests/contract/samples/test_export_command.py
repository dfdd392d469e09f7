"""The command `tokenproxy export` on stores on disk; `tests/unit/samples/test_export.py` has the export."""

import asyncio
import json
import os
from pathlib import Path

import pyarrow.parquet
import pytest

from tests.support.store_utils import opened
from tests.support.trees import add_rollouts
from tokenproxy.cli.main import main
from tokenproxy.record.store import StoreError
from tokenproxy.record.turn import Turn
from tokenproxy.samples.layouts import LAYOUTS
from tokenproxy.store.sqlite import SqliteStore

Capture = pytest.CaptureFixture[str]


def _stored(folder: Path, *ids: str) -> str:
    url = f"sqlite://{folder / 'kept.db'}"

    async def fill() -> None:
        async with opened(url) as store:
            await add_rollouts(store, *ids)

    asyncio.run(fill())
    return url


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store on disk with two rollouts."""
    return _stored(tmp_path, "t/x", "y")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The file that is written; nothing else of its name may remain."""
    (tmp_path / "written").mkdir()
    return tmp_path / "written" / "out.jsonl"


def test_the_command(url: str, out: Path, capsys: Capture, tmp_path: Path) -> None:
    out.write_text("older")
    config = tmp_path / "settings.yaml"
    config.write_text(f"store: {url}\n")
    assert main(["export", "--config", str(config), "--out", str(out)]) == 0
    assert (len(out.read_text().splitlines()), list(out.parent.iterdir())) == (4, [out])
    printed = capsys.readouterr()
    assert "no_logprobs" in printed.out and str(out) in printed.out and printed.err == ""
    assert main(["export", "--store", url, "--out", "-", "--session", "y"]) == 0
    printed = capsys.readouterr()
    assert [json.loads(line)["rollout"] for line in printed.out.splitlines()] == ["y", "y"]
    assert "rollouts" in printed.err


def test_every_flag_of_the_command(url: str, out: Path) -> None:
    flags = ["--format", "parquet", "--layout", "verl", "--session", "x", "--shared", "each"]
    assert main(["export", "--store", url, "--out", str(out), *flags]) == 0
    rows = pyarrow.parquet.read_table(out).to_pylist()
    assert list(rows[0]) == list(LAYOUTS["verl"].columns)
    assert [row["response_mask"] for row in rows] == [[1, 1, 0, 1], [1, 1, 0, 1]]
    assert {json.loads(row["extra_fields"])["rollout"] for row in rows} == {"x"}
    named = out.with_suffix(".parquet")  # the suffix chooses the format
    assert main(["export", "--store", url, "--out", str(named)]) == 0
    assert pyarrow.parquet.read_metadata(named).num_rows == 4


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--out", "-", "--format", "parquet"], "--out FILE.parquet"),
        (["--out", "OUT", "--session", "same"], "same: t/same, u/same"),
        (["--out", "OUT", "--store", "sqlite:missing.db"], "missing.db"),
        (["--out", "OUT", "--store", "memory:"], "/v1/sessions/{session}/samples"),
        (["--out", "PIPE"], "--out -"),
        (["--out", "x.csv"], ".csv: pass --out FILE.jsonl or FILE.parquet"),
        (["--out", "OUT", "--after", "1"], "--follow"),
        (["--follow", "--out", "OUT", "--format", "parquet"], "JSON lines"),
        (["--follow", "--out", "OUT", "--session", "y"], "--metadata KEY=VALUE"),
        (["--follow", "--out", "OUT", "--metadata", "=math"], "KEY=VALUE"),
        (["--follow", "--out", "."], "not a regular file"),
        (["--follow", "--out", "OUT", "--store", "memory:"], "/v1/samples"),
    ],
)
def test_wrong_use_is_reported_in_a_single_line(
    flags: list[str], words: str, tmp_path: Path, out: Path, capsys: Capture
) -> None:
    url, pipe = _stored(tmp_path, "t/same", "u/same"), tmp_path / "pipe"
    os.mkfifo(pipe)
    places = {"OUT": str(out), "PIPE": str(pipe)}
    assert main(["export", "--store", url, *[places.get(flag, flag) for flag in flags]]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("tokenproxy: ") and words in line
    assert list(out.parent.iterdir()) == [] and pipe.is_fifo()


@pytest.mark.parametrize(
    ("suffix", "error"),
    [(".jsonl", StoreError("the store is gone")), (".parquet", OSError("the disk is full"))],
)
def test_an_export_that_fails_leaves_the_older_file(
    error: Exception, suffix: str, url: str, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    out = out.with_suffix(suffix)
    out.write_text("older")
    turns = SqliteStore.turns

    async def fail(store: SqliteStore, rollout: str) -> list[Turn]:
        if rollout == "t/x":  # the older one: the second to be read
            raise error
        return await turns(store, rollout)

    monkeypatch.setattr(SqliteStore, "turns", fail)
    assert main(["export", "--store", url, "--out", str(out)]) == 1
    assert capsys.readouterr().err == f"tokenproxy: {error}\n"
    assert (out.read_text(), list(out.parent.iterdir())) == ("older", [out])


def test_a_missing_folder_and_an_empty_store_are_named(tmp_path: Path, url: str, capsys: Capture) -> None:
    folder = tmp_path / "missing"
    assert main(["export", "--store", url, "--out", str(folder / "x.jsonl")]) == 1
    assert f"there is no folder {folder}: create it" in capsys.readouterr().err
    empty = tmp_path / "empty.db"
    empty.touch()
    assert main(["export", "--store", f"sqlite://{empty}", "--out", str(tmp_path / "x.jsonl")]) == 0
    assert f"the store is {empty}: pass --store URL" in capsys.readouterr().err
