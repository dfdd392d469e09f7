"""Exports of a store: which rollouts, each once, and the files."""

import io
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from proxy.history.store import Cursor, Limits, Session, Store
from proxy.history.turn import Turn
from proxy.samples import export as module
from proxy.samples.export import (
    ExportRefused,
    JsonLines,
    Parquet,
    Report,
    export,
    table,
)
from proxy.samples.layouts import LAYOUTS
from proxy.stores.memory import MemoryStore
from tests.support.trees import rollout, root


async def _filled(ids: Iterable[str]) -> Store:
    """A store that holds `rollout(id)` for each id, which is `tenant/name` or a name."""
    store = MemoryStore(Limits())
    for session_id in ids:
        turns = rollout(session_id)
        tenant = session_id.rpartition("/")[0]
        session = Session(id=session_id, tenant=tenant, created=1.0, used=1.0)
        await store.add(session, turns, [[] for _ in turns])
    return store


class _Timed:
    """A store of one turn per session whose times of use are given."""

    def __init__(self, used: dict[str, float], *, on_page: dict[int, str] | None = None) -> None:
        """`on_page`: which session is used before the page of this number is read."""
        self.used = used
        self._on_page = on_page or {}
        self.pages = 0

    async def sessions(
        self, *, limit: int, tenant: str | None = None, before: Cursor | None = None
    ) -> list[Session]:
        if self.pages in self._on_page:
            self.used[self._on_page[self.pages]] = 1000.0 + self.pages
        self.pages += 1
        places = sorted(((used, name) for name, used in self.used.items()), reverse=True)
        listed = [name for used, name in places if before is None or (used, name) < before]
        return [Session(id=name, created=1.0, used=self.used[name]) for name in listed[:limit]]

    async def session(self, rollout: str) -> Session | None:
        return Session(id=rollout, created=1.0, used=self.used[rollout]) if rollout in self.used else None

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
    assert {(row["leaf"], row["reward"]) for row in rows} == {
        *(("x-b", None), ("x-c", None), ("y-b", 0.5), ("y-c", 0.5))
    }
    assert report == Report(2, 4, 8, 2, Counter({"no_logprobs": 2}))
    assert (await _exported(store, shared="each"))[1].trained_ids > 8
    assert "no_logprobs        2  the engine returned no log-prob" in table(report, "-")


async def test_a_session_by_id_or_by_the_name_that_only_a_single_tenant_has() -> None:
    store = await _filled(["t/x", "u/x", "t/y", "z", "t/z", "u/z"])
    for word, expected in {"t/x": "t/x", "y": "t/y", "z": "/z", "t/z": "t/z"}.items():
        rows, _ = await _exported(store, only=[word])
        assert {f"{row['tenant']}/{row['rollout']}" for row in rows} == {expected}
    rows, report = await _exported(store, only=["z", "y", "t/y", "z"])
    assert list(dict.fromkeys(row["rollout"] for row in rows)) == ["z", "y"] and report.rollouts == 2
    with pytest.raises(ExportRefused, match="unknown session t/"):
        await _exported(store, only=["z", "t/"])
    with pytest.raises(ExportRefused, match="x: t/x, u/x"):
        await _exported(store, only=["z", "x"])


async def test_sessions_deleted_meanwhile_are_not_counted() -> None:
    store = _Timed({"x": 2.0, "y": 1.0})
    rows, report = await _exported(store, on_rollout=lambda: store.used.pop("y", None))
    assert ([row["rollout"] for row in rows], report.rollouts) == (["x"], 1)


@pytest.mark.parametrize("on_page", [{}, {1: "s0", 2: "s9"}, {1: "s1", 2: "s0", 3: "s2"}])
async def test_a_session_used_while_sessions_are_listed_is_exported_once(
    on_page: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SESSIONS_AT_ONCE", 3)
    # "t" was used last, in the instant in which the first of `on_page` will be
    store = _Timed({f"s{i}": float(i) for i in range(10)} | {"t": 1001.0}, on_page=on_page)
    rows, _ = await _exported(store)
    assert sorted(row["rollout"] for row in rows) == sorted(store.used)


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
    if name == "plain":
        types = {"prompt_ids": "int32", "loss_mask": "int8", "logprobs": "float"}
        assert {name: str(read.schema_arrow.field(name).type.value_type) for name in types} == types
    assert read.metadata.num_row_groups > 1
    nested = layout.named("json")
    rows = [{**row, **{field: json.loads(row[field]) for field in nested}} for row in read.read().to_pylist()]
    assert rows == [json.loads(line) for line in lines.getvalue().splitlines()]


def test_without_pyarrow_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ExportRefused, match=r"pip install 'tokenproxy\[parquet\]'"):
        Parquet(io.BytesIO(), LAYOUTS["plain"])
