"""A follower of the feed: what it writes, and where it stands when it stops."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.trees import add_rollouts
from tests.support.utils import until
from tokenproxy.record.store import Limits, Store, StoreError
from tokenproxy.record.vocabulary import Cause
from tokenproxy.samples.feed import FeedFilter
from tokenproxy.samples.follow import Follower, end_last_line
from tokenproxy.samples.layouts import LAYOUTS
from tokenproxy.store.sqlite import SqliteStore


async def _finish(store: Store, name: str) -> None:
    await add_rollouts(store, name)
    assert await store.finish(name, Cause.END)


async def test_a_store_that_fails_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteStore(None, Limits())
    await _finish(store, "a")
    file, errors, reads = io.BytesIO(), list[StoreError](), 0
    read = store.feed

    async def fail_at_times(after: int, *, limit: int, **kwargs: Any) -> Any:
        nonlocal reads
        reads += bool(limit)
        if limit and reads in (3, 4, 6):
            raise StoreError("gone")
        return await read(after, limit=limit, **kwargs)

    monkeypatch.setattr(store, "feed", fail_at_times)
    follower = Follower(store, LAYOUTS["plain"], FeedFilter(), 0, poll_s=0.001)
    running = asyncio.create_task(follower.run(file, errors.append))
    await until(lambda: reads > 6)
    await _finish(store, "b")
    await until(lambda: follower.report.rollouts == 2)
    follower.stop()
    await running
    # reported once each time
    assert [str(error) for error in errors] == ["gone", "gone"]
    assert follower.position == (await store.feed(2**62, limit=0)).end
    assert [json.loads(line)["rollout"] for line in file.getvalue().splitlines()] == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"a":1}\n{"b":2}', b'{"a":1}\n{"b":2}\n'),
        (b'{"a":1}\n{"b":', b'{"a":1}\n'),
        (b'{"b":', b""),
        (b'{"a":"' + b"x" * 200_000 + b'"}\n{"b":"' + b"y" * 200_000, b'{"a":"' + b"x" * 200_000 + b'"}\n'),
    ],
)
def test_the_last_line_is_whole(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(before)
    with path.open("r+b") as file:
        end_last_line(file)
        file.write(b"next\n")
    assert path.read_bytes() == after + b"next\n"
