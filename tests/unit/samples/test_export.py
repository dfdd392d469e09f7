"""Exports of a store: which rollouts, each once, and the files."""

import io
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.support.trees import add_rollouts
from tokenproxy.record.store import Limits, Session, Store
from tokenproxy.record.turn import Turn
from tokenproxy.record.vocabulary import Cause
from tokenproxy.samples import export as module
from tokenproxy.samples.export import ExportRefused, JsonLines, Parquet, Report, export, table
from tokenproxy.samples.layouts import LAYOUTS
from tokenproxy.samples.samples import Selection
from tokenproxy.store.sqlite import SqliteStore


async def _filled(*ids: str) -> Store:
    store = SqliteStore(None, Limits())
    await add_rollouts(store, *ids)
    return store


class _Moving(SqliteStore):
    """A store in which sessions are used between the pages of the list."""

    def __init__(self, on_page: dict[int, str]) -> None:
        """`on_page`: which session is used before the page of this number is read."""
        super().__init__(None, Limits(max_age_s=1e10))
        self._on_page = on_page
        self._pages = 0

    async def sessions(self, **which: Any) -> list[Session]:
        if (name := self._on_page.get(self._pages)) is not None:
            await self.add(Session(id=name, created=1.0))
        self._pages += 1
        return await super().sessions(**which)


async def _exported(store: Any, **options: Any) -> tuple[list[dict[str, Any]], Report]:
    file = io.BytesIO()
    report = await export(store, JsonLines(file), LAYOUTS["plain"], **options)
    return [json.loads(line) for line in file.getvalue().splitlines()], report


async def test_all_rollouts_of_a_store() -> None:
    store = await _filled("x", "y")
    await store.finish("y", Cause.REWARD, {"": 0.5})
    rows, report = await _exported(store)
    assert {(row["leaf"], row["reward"]) for row in rows} == {
        *(("x-b", None), ("x-c", None), ("y-b", 0.5), ("y-c", 0.5))
    }
    assert report == Report(2, 4, 8, 2, Counter({"no_logprobs": 2}))
    assert (await _exported(store, selection=Selection("each")))[1].trained_ids > 8
    assert "no_logprobs        2  the engine returned no log-prob" in table(report, "-")


async def test_a_session_by_id_or_by_the_name_that_only_a_single_tenant_has() -> None:
    store = await _filled("t/x", "u/x", "t/y", "z", "t/z", "u/z")
    for word, expected in {"t/x": "t/x", "y": "t/y", "z": "/z", "t/z": "t/z"}.items():
        rows, _ = await _exported(store, only=[word])
        assert {f"{row['tenant']}/{row['rollout']}" for row in rows} == {expected}
    rows, report = await _exported(store, only=["z", "y", "t/y", "z"])
    assert list(dict.fromkeys(row["rollout"] for row in rows)) == ["z", "y"] and report.rollouts == 2
    with pytest.raises(ExportRefused, match="unknown session t/"):
        await _exported(store, only=["z", "t/"])
    with pytest.raises(ExportRefused, match="x: t/x, u/x"):
        await _exported(store, only=["z", "x"])


async def test_sessions_deleted_meanwhile_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    store = await _filled("x", "y")

    read = store.turns

    async def turns(rollout: str) -> list[Turn]:
        await store.delete({"x": "y", "y": "x"}[rollout])
        return await read(rollout)

    monkeypatch.setattr(store, "turns", turns)
    _, report = await _exported(store)
    assert report.rollouts == 1


@pytest.mark.parametrize("on_page", [{}, {1: "s0", 2: "s9"}, {1: "s1", 2: "s0", 3: "s2"}])
async def test_a_session_used_while_sessions_are_listed_is_exported_once(
    on_page: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SESSIONS_AT_ONCE", 3)
    store = _Moving(on_page)
    names = [f"s{i}" for i in range(10)]
    for name in names:
        await add_rollouts(store, name)
    rows, _ = await _exported(store)
    assert sorted(row["leaf"] for row in rows) == sorted(f"{name}-{leaf}" for name in names for leaf in "bc")


@pytest.mark.parametrize("name", LAYOUTS)
async def test_parquet_holds_what_json_holds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDS_AT_ONCE", 8)
    store = await _filled("x", "y")
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
