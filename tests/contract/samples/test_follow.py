"""`tokenproxy export --follow`: finished rollouts as they come, until a signal."""

import asyncio
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

from tests.support.store_utils import bare, opened
from tests.support.trees import rollout
from tests.support.utils import wait_until
from tokenproxy.record.store import Session
from tokenproxy.record.turn import WeightSpan
from tokenproxy.record.vocabulary import Cause
from tokenproxy.samples.layouts import LAYOUTS

Capture = pytest.CaptureFixture[str]
_COMMAND = [sys.executable, "-m", "tokenproxy", "export", "--follow"]


def _finish(url: str, name: str, metadata: bytes = b"{}", version: str = "") -> None:
    """Finish a rollout, which gives two samples, from another process than the command's."""
    turns = rollout(name)
    if version:
        turns = [replace(turn, weight_versions=(WeightSpan(version, 0, 1),)) for turn in turns]
    tenant = name.rpartition("/")[0]
    session = Session(id=name, tenant=tenant, created=1.0, used=1.0, metadata=metadata)

    async def write() -> None:
        async with opened(url) as store:
            await store.add(session, bare(turns))
            assert await store.finish(name, Cause.END)

    asyncio.run(write())


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store on disk with one finished rollout."""
    url = f"sqlite://{tmp_path / 'kept.db'}"
    _finish(url, "t/x")
    return url


def _rows(out: Path) -> list[dict[str, Any]]:
    """What stands in whole lines: the last one may be on its way."""
    written = out.read_text() if out.exists() else ""
    return [json.loads(line) for line in written[: written.rfind("\n") + 1].splitlines()]


def _await_rows(out: Path, count: int) -> None:
    wait_until(lambda: len(_rows(out)) == count)


def _cursor(err: str) -> str:
    [cursor] = re.findall(r"(?m)^tokenproxy: continue with --after (\d+)$", err)
    return str(cursor)


@contextmanager
def _run(url: str, out: str, *flags: str) -> Iterator["subprocess.Popen[str]"]:
    command = [*_COMMAND, "--store", url, "--out", out, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_signal_ends_it_and_the_cursor_continues_it(url: str, tmp_path: Path) -> None:
    out, cursor = tmp_path / "out.jsonl", "0"
    for number, name, seen in ((signal.SIGINT, "t/y", 2), (signal.SIGTERM, "u/z", 4)):
        with _run(url, str(out), "--after", cursor) as process:
            _await_rows(out, seen)
            _finish(url, name)
            _await_rows(out, seen + 2)
            process.send_signal(number)
            printed, err = process.communicate(timeout=30)
        assert (process.returncode, printed) == (0, "")
        assert re.search(rf"rollouts +{2 if number == signal.SIGINT else 1}", err) and str(out) in err
        cursor = _cursor(err)
    found = [(row["tenant"], row["rollout"], row["revision"]) for row in _rows(out)]
    assert found == [(tenant, name, 1) for tenant, name in ("tx", "tx", "ty", "ty", "uz", "uz")]


def test_to_stdout_with_filters_and_a_layout(url: str) -> None:
    _finish(url, "t/old", metadata=b'{"env":"math"}', version="6")
    _finish(url, "t/y", metadata=b'{"env":"math"}', version="7")
    _finish(url, "t/z", version="7")
    flags = ["--layout", "trl", "--metadata", "env=math", "--weight-version", "7", "--shared", "each"]
    with _run(url, "-", *flags) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=30)
    assert (process.returncode, rest) == (0, "")
    assert [list(json.loads(line)) for line in lines] == [list(LAYOUTS["trl"].columns)] * 2
    assert {json.loads(line)["rollout"] for line in lines} == {"y"}


def test_a_reader_that_leaves(url: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [*_COMMAND, "--store", url, "--out", "-"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert ended.returncode == 1
    assert _cursor(ended.stderr) == "0"
