"""`tokenproxy export --follow`: finished rollouts as they come, until a signal."""

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.cli import main
from proxy.history.feed import Cause
from proxy.history.store import Session, Store, StoreError
from proxy.history.turn import WeightSpan
from proxy.samples import follow
from proxy.samples.feed import FeedFilter
from proxy.samples.follow import Follower, end_last_line
from proxy.samples.layouts import LAYOUTS
from tests.support.store_utils import opened
from tests.support.trees import rollout
from tests.support.utils import wait_until

Capture = pytest.CaptureFixture[str]


async def _finish(store: Store, *names: str, metadata: bytes = b"{}", version: str = "") -> None:
    for name in names:
        turns = rollout(name)
        if version:
            turns = [replace(turn, weight_versions=(WeightSpan(version, 0, 1),)) for turn in turns]
        tenant = name.rpartition("/")[0]
        session = Session(id=name, tenant=tenant, created=1.0, used=1.0, metadata=metadata)
        await store.add(session, turns, [[] for _ in turns])
        assert await store.feed.finish(name, Cause.END)


def _write(url: str, *names: str, **options: Any) -> None:
    """Finish rollouts from another process than the command's."""

    async def write() -> None:
        async with opened(url) as store:
            await _finish(store, *names, **options)

    asyncio.run(write())


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    """A store on disk with one finished rollout, which gives two samples."""
    url = f"sqlite://{tmp_path / 'kept.db'}"
    _write(url, "t/x")
    return url


class _Command:
    """The command in a process of its own."""

    def __init__(self, url: str, out: str, *flags: str) -> None:
        command = [sys.executable, "-m", "proxy.cli", "export", "--follow", "--store", url, "--out", out]
        self.process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def end(self, number: signal.Signals = signal.SIGINT) -> tuple[int, str, str]:
        """Send a signal; exit code, stdout and stderr."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out.decode(), err.decode()


@contextmanager
def _running(url: str, out: str, *flags: str) -> Iterator[_Command]:
    command = _Command(url, out, *flags)
    try:
        yield command
    finally:
        command.process.kill()
        command.process.wait()


def _rows(out: Path) -> list[dict[str, Any]]:
    lines = out.read_text().splitlines() if out.exists() else []
    return [json.loads(line) for line in lines]


def _cursor(err: str) -> str:
    [cursor] = re.findall(r"(?m)^tokenproxy: continue with --after (\d+)$", err)
    return str(cursor)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=["int", "term"]
)
def test_a_signal_ends_it_and_the_cursor_continues_it(
    store_url: str, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "out.jsonl"
    with _running(store_url, str(out)) as command:
        wait_until(lambda: len(_rows(out)) == 2)
        _write(store_url, "t/y")
        wait_until(lambda: len(_rows(out)) == 4)
        code, printed, err = command.end(number)
    assert (code, printed) == (0, "")
    assert re.search(r"rollouts +2", err) and str(out) in err
    _write(store_url, "u/z")
    with _running(store_url, str(out), "--after", _cursor(err)) as command:
        wait_until(lambda: len(_rows(out)) == 6)
        code, _, err = command.end(number)
    assert code == 0 and re.search(r"rollouts +1", err)
    assert [(row["tenant"], row["rollout"]) for row in _rows(out)] == [
        *[("t", "x")] * 2,
        *[("t", "y")] * 2,
        *[("u", "z")] * 2,
    ]
    assert {row["revision"] for row in _rows(out)} == {1}


def test_to_stdout_with_filters_and_a_layout(store_url: str) -> None:
    _write(store_url, "t/y", metadata=b'{"env":"math"}')
    flags = ("--layout", "trl", "--metadata", "env=math", "--shared", "each")
    with _running(store_url, "-", *flags) as command:
        assert command.process.stdout is not None
        lines = [command.process.stdout.readline() for _ in range(2)]
        code, rest, _ = command.end()
    assert (code, rest) == (0, "")
    assert [list(json.loads(line)) for line in lines] == [list(LAYOUTS["trl"].columns)] * 2
    assert {json.loads(line)["rollout"] for line in lines} == {"y"}


def test_a_reader_that_leaves(store_url: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "proxy.cli", "export", "--follow", "--store", store_url, "--out", "-"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert ended.returncode == 1
    assert _cursor(ended.stderr) == "0"


def test_weights_select_samples(store_url: str, tmp_path: Path) -> None:
    _write(store_url, "t/old", version="6")
    _write(store_url, "t/new", version="7")
    out = tmp_path / "out.jsonl"
    with _running(store_url, str(out), "--weight-version", "7") as command:
        wait_until(lambda: len(_rows(out)) >= 2)
        command.end()
    assert [row["rollout"] for row in _rows(out)] == ["new"] * 2


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--follow", "--out", "x.parquet"], "JSON lines"),
        (["--follow", "--out", "x", "--format", "parquet"], "JSON lines"),
        (["--follow", "--out", "x", "--session", "y"], "--metadata KEY=VALUE"),
        (["--follow", "--out", "x", "--metadata", "env"], "KEY=VALUE"),
        (["--follow", "--out", "x", "--metadata", "=math"], "KEY=VALUE"),
        (["--follow", "--out", "."], "not a regular file"),
        (["--follow", "--out", "x", "--store", "memory:"], "/v1/samples"),
        (["--out", "x", "--after", "1"], "--follow"),
        (["--out", "x", "--metadata", "a=b"], "--follow"),
        (["--out", "x", "--weight-version", "7"], "--follow"),
    ],
)
def test_wrong_use_is_reported_in_a_single_line(
    flags: list[str], words: str, store_url: str, capsys: Capture, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", "--store", store_url, *flags]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("tokenproxy: ") and words in line
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("cursor", ["x", "-1", "1" * 19, ""])
def test_cursors_that_are_none(cursor: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["export", "--follow", "--out", "x", f"--after={cursor}"])
    assert "must be a cursor" in capsys.readouterr().err


# --- the follower itself


async def test_a_store_that_fails_for_a_while(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "POLL_S", 0.01)
    await _finish(store, "a")
    file, errors = io.BytesIO(), list[StoreError]()
    follower = Follower(store, LAYOUTS["plain"], FeedFilter(), "once", 0)
    running = asyncio.create_task(follower.run(file, errors.append))
    await _until(lambda: follower.report.rollouts == 1)
    read = store.feed.read

    async def fail(*args: Any, **kwargs: Any) -> Any:
        raise StoreError("gone")

    for _ in range(2):
        monkeypatch.setattr(store.feed, "read", fail)
        await asyncio.sleep(0.05)
        monkeypatch.setattr(store.feed, "read", read)
        await asyncio.sleep(0.05)
    await _finish(store, "b")
    await _until(lambda: follower.report.rollouts == 2)
    follower.stop()
    await asyncio.wait_for(running, 5)
    # reported once each time
    assert [str(error) for error in errors] == ["gone", "gone"]
    assert follower.position == await store.feed.end()
    assert [json.loads(line)["rollout"] for line in file.getvalue().splitlines()] == ["a", "a", "b", "b"]


async def test_a_position_beyond_the_end_is_the_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the loss of a store: what is finished after the start is written."""
    monkeypatch.setattr(follow, "POLL_S", 0.01)
    await _finish(store, "a")
    end = await store.feed.end()
    follower = Follower(store, LAYOUTS["plain"], FeedFilter(), "once", 10**17)
    running = asyncio.create_task(follower.run(io.BytesIO(), print))
    await _until(lambda: follower.position == end)
    await _finish(store, "b")
    await _until(lambda: follower.report.rollouts == 1)
    follower.stop()
    await running


async def test_nothing_is_skipped_when_it_is_stopped(store: Store) -> None:
    names = [f"r{number}" for number in range(5)]
    await _finish(store, *names)
    found = await store.feed.read(0, limit=9)

    class StopAfterTwo(io.BytesIO):
        def flush(self) -> None:
            if follower.report.rollouts == 1:
                follower.stop()

    follower = Follower(store, LAYOUTS["plain"], FeedFilter(), "once", 0)
    await follower.run(StopAfterTwo(), print)
    assert follower.position == found[1].position
    rest = Follower(store, LAYOUTS["plain"], FeedFilter(), "once", follower.position)
    running = asyncio.create_task(rest.run(io.BytesIO(), print))
    await _until(lambda: rest.report.rollouts == 3)
    rest.stop()
    await running


async def _until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    "before, after",
    [
        (b"", b""),
        (b'{"a":1}\n', b'{"a":1}\n'),
        (b'{"a":1}\n{"b":2}', b'{"a":1}\n{"b":2}\n'),
        (b'{"a":1}\n{"b":', b'{"a":1}\n'),
        (b'{"b":', b""),
        (b'{"a":"' + b"x" * 200_000 + b'"}\n{"b":"' + b"y" * 200_000, b'{"a":"' + b"x" * 200_000 + b'"}\n'),
    ],
    ids=["empty", "whole", "no newline", "cut", "cut first line", "long"],
)
def test_the_last_line_is_whole(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(before)
    with path.open("r+b") as file:
        end_last_line(file)
        file.write(b"next\n")
    assert path.read_bytes() == after + b"next\n"
