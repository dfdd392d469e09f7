"""The command `tokenproxy export` on stores on disk."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pyarrow.parquet
import pytest

from proxy.cli import main
from proxy.history.store import Session, Store, StoreError
from proxy.samples.layouts import LAYOUTS
from proxy.stores.sqlite import SqliteStore
from tests.support.store_utils import opened
from tests.support.trees import child, rollout, root

Capture = pytest.CaptureFixture[str]


async def _fill(store: Store, ids: Iterable[str]) -> None:
    for session_id in ids:
        turns = rollout(session_id)
        tenant = session_id.rpartition("/")[0]
        session = Session(id=session_id, tenant=tenant, created=1.0, used=1.0)
        await store.add(session, turns, [[] for _ in turns])


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store on disk with two rollouts."""
    return _stored(tmp_path, ["x", "y"])


def _stored(folder: Path, ids: Iterable[str]) -> str:
    url = f"sqlite://{folder / 'kept.db'}"

    async def fill() -> None:
        async with opened(url) as store:
            await _fill(store, ids)

    asyncio.run(fill())
    return url


def test_the_command(url: str, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("older")
    assert main(["export", "--store", url, "--out", str(out)]) == 0
    assert len(out.read_text().splitlines()) == 4
    printed = capsys.readouterr()
    assert "no_logprobs" in printed.out and str(out) in printed.out
    assert printed.err == ""
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == ["out.jsonl"]


def test_every_flag_of_the_command(url: str, tmp_path: Path) -> None:
    out = tmp_path / "samples"
    flags = ["--format", "parquet", "--layout", "verl", "--session", "y", "--shared", "each"]
    assert main(["export", "--store", url, "--out", str(out), *flags]) == 0
    rows = pyarrow.parquet.read_table(out).to_pylist()
    assert list(rows[0]) == list(LAYOUTS["verl"].columns)
    assert [row["response_mask"] for row in rows] == [[1, 1, 0, 1], [1, 1, 0, 1]]
    assert {json.loads(row["extra_fields"])["rollout"] for row in rows} == {"y"}


def test_a_session_by_name(tmp_path: Path, capsys: Capture) -> None:
    url, out = _stored(tmp_path, ["t/x", "t/y", "u/y"]), tmp_path / "out.jsonl"
    assert main(["export", "--store", url, "--out", str(out), "--session", "x"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(row["tenant"], row["rollout"]) for row in rows} == {("t", "x")}
    assert main(["export", "--store", url, "--out", str(out), "--session", "y"]) == 2
    assert "y: t/y, u/y" in capsys.readouterr().err
    assert main(["export", "--store", url, "--out", str(out), "--session", "u/y"]) == 0


def test_choices_that_share_a_prompt(tmp_path: Path) -> None:
    """They are stored with one prompt, and exported with it in each."""
    a = root("a", [1], [2])
    b = child("b", a, [3, 4], [5], request="q")
    c = child("c", a, [3, 4], [6], request="q", choice=1, prompt_turn="b", messages=b.messages)
    url, out = f"sqlite://{tmp_path / 'kept.db'}", tmp_path / "out.jsonl"

    async def fill() -> None:
        async with opened(url) as store:
            await store.add(Session(id="r", created=1.0, used=1.0), [a, b, c], [[], [], []])

    asyncio.run(fill())
    assert main(["export", "--store", url, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["completion_ids"] for row in rows] == [[2, 3, 4, 5], [2, 3, 4, 6]]
    assert [row["messages"][2]["content"] for row in rows] == ["to b", "to b"]


@pytest.mark.parametrize("quiet_s, shown", [(0.0, True), (60.0, False)])
def test_only_a_long_export_shows_progress(
    quiet_s: float, shown: bool, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("proxy.export_command._QUIET_S", quiet_s)
    assert main(["export", "--store", url, "--out", str(tmp_path / "out.jsonl")]) == 0
    assert ("2/2" in capsys.readouterr().err) is shown


def test_the_suffix_chooses_the_format(url: str, tmp_path: Path) -> None:
    out = tmp_path / "samples.parquet"
    assert main(["export", "--store", url, "--out", str(out)]) == 0
    assert pyarrow.parquet.read_metadata(out).num_rows == 4


def test_the_store_of_the_settings(url: str, tmp_path: Path) -> None:
    config, out = tmp_path / "settings.yaml", tmp_path / "out.jsonl"
    config.write_text(f"store: {url}\n")
    assert main(["export", "--config", str(config), "--out", str(out)]) == 0
    assert len(out.read_text().splitlines()) == 4


def test_stdout_holds_only_rows(url: str, capsys: Capture) -> None:
    assert main(["export", "--store", url, "--out", "-", "--session", "x"]) == 0
    printed = capsys.readouterr()
    assert [json.loads(line)["rollout"] for line in printed.out.splitlines()] == ["x", "x"]
    assert "rollouts" in printed.err


def test_an_empty_store_gives_an_empty_file(tmp_path: Path, capsys: Capture) -> None:
    out, url = tmp_path / "out.jsonl", _stored(tmp_path, [])
    assert main(["export", "--store", url, "--out", str(out)]) == 0
    assert out.read_bytes() == b""
    assert "nothing to export" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--out", "-", "--format", "parquet"], "--out FILE.parquet"),
        (["--out", "OUT", "--session", "nobody"], "unknown session nobody"),
        (["--out", "OUT", "--store", "nonsense://x"], "nonsense"),
        (["--out", "OUT", "--store", "sqlite:missing.db"], "missing.db"),
        (["--out", "OUT", "--store", "memory:"], "/v1/sessions/{session}/samples"),
        (["--out", "OUT", "--config", "missing.yaml"], "missing.yaml"),
    ],
)
def test_wrong_use_is_reported_in_a_single_line(
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
def test_an_export_that_fails_leaves_the_older_file(
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


def test_closed_pipe_is_not_an_error(url: str) -> None:
    command = [sys.executable, "-m", "proxy.cli", "export", "--store", url, "--out", "-"]
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (process.returncode, process.stderr) == (1, "")


def test_help_names_the_choices(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["export", "--help"])
    assert exited.value.code == 0
    text = capsys.readouterr().out
    assert [
        word for word in [*LAYOUTS, "--shared", "--session", "sqlite:", "Exit code"] if word not in text
    ] == []
