"""Exports of a store: which rollouts, each once, and the files."""

import io
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet
import pytest

from proxy.history.store import Cursor, Limits, Session, Store
from proxy.history.turn import Turn
from proxy.samples import export as module
from proxy.samples.export import (
    JsonLines,
    NameNotUnique,
    Parquet,
    ParquetMissing,
    Report,
    UnknownSession,
    export,
    table,
)
from proxy.samples.layouts import LAYOUTS
from proxy.samples.samples import samples_of
from proxy.stores.memory import MemoryStore
from tests.support.trees import child, rollout, root


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
    rows, report = await _exported(store)
    session = await store.session("x")
    samples = samples_of(await store.turns("x"), {}, session=session).samples
    assert rows == [msgspec.json.decode(msgspec.json.encode(LAYOUTS["plain"].row(s))) for s in samples]
    _, each = await _exported(store, shared="each")
    assert (report.trained_ids, each.trained_ids) == (4, 6)


async def test_only_some_sessions_in_the_given_order() -> None:
    rows, report = await _exported(await _filled(["x", "t/y", "z"]), only=["z", "y", "t/y", "z"])
    assert list(dict.fromkeys((row["tenant"], row["rollout"]) for row in rows)) == [("", "z"), ("t", "y")]
    assert report.rollouts == 2


@pytest.mark.parametrize(
    "word, expected",
    [("t/x", ("t", "x")), ("y", ("t", "y")), ("z", ("", "z")), ("t/z", ("t", "z"))],
    ids=["id", "name", "id-without-tenant", "id-with-tenant"],
)
async def test_a_session_by_id_or_by_the_name_that_only_a_single_tenant_has(
    word: str, expected: tuple[str, str]
) -> None:
    store = await _filled(["t/x", "u/x", "t/y", "z", "t/z", "u/z"])
    rows, report = await _exported(store, only=[word])
    assert {(row["tenant"], row["rollout"]) for row in rows} == {expected}
    assert report.rollouts == 1


async def test_sessions_that_are_not_named_uniquely_write_nothing() -> None:
    store, file = await _filled(["x", "t/x", "u/q", "t/q"]), io.BytesIO()
    for unknown in ("nobody", "u/x", "t/"):
        with pytest.raises(UnknownSession, match=f"unknown session {unknown}"):
            await export(store, JsonLines(file), LAYOUTS["plain"], only=["x", unknown])
    with pytest.raises(NameNotUnique, match="q: t/q, u/q"):
        await export(store, JsonLines(file), LAYOUTS["plain"], only=["x", "q"])
    assert file.getvalue() == b""


async def test_sessions_without_turns_or_deleted_meanwhile_are_not_counted() -> None:
    empty = MemoryStore(Limits())
    await empty.save_session(Session(id="s", created=1.0, used=1.0))
    assert await _exported(empty) == ([], Report())
    store = _Timed({"x": 2.0, "y": 1.0})
    rows, report = await _exported(store, on_rollout=lambda: store.used.pop("y", None))
    assert ([row["rollout"] for row in rows], report.rollouts) == (["x"], 1)


@pytest.mark.parametrize("apart", [1, 2, 10], ids=["apart", "pairs", "all at once"])
@pytest.mark.parametrize("at_once", [1, 3, 10, 11])
async def test_every_session_is_exported_once_with_any_page_size(
    apart: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SESSIONS_AT_ONCE", at_once)
    used = {f"s{i}": float(i // apart) for i in range(10)}
    rows, report = await _exported(_Timed(used))
    assert sorted(row["rollout"] for row in rows) == sorted(used)
    assert report.rollouts == 10


@pytest.mark.parametrize("on_page", [{1: "s0"}, {1: "s0", 2: "s9"}, {1: "s1", 2: "s0", 3: "s2"}], ids=str)
async def test_a_session_used_while_sessions_are_listed_is_exported_once(
    on_page: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SESSIONS_AT_ONCE", 3)
    # "t" was used last, in the instant in which the first of `on_page` will be
    store = _Timed({f"s{i}": float(i) for i in range(10)} | {"t": 1001.0}, on_page=on_page)
    rows, _ = await _exported(store)
    assert sorted(row["rollout"] for row in rows) == sorted(store.used)


async def test_sessions_used_all_the_time_are_exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SESSIONS_AT_ONCE", 3)
    store = _Timed({f"s{i}": float(i) for i in range(10)})
    done: list[str] = []

    def use_all() -> None:
        store.used = {name: used + 1000.0 for name, used in reversed(store.used.items())}
        done.append("a rollout")

    rows, _ = await _exported(store, on_rollout=use_all)
    assert sorted(row["rollout"] for row in rows) == sorted(store.used)
    assert len(done) == 10


async def test_choices_that_share_a_prompt_are_exported_with_it() -> None:
    a = root("a", [1], [2])
    b = child("b", a, [3, 4], [5], request="q")
    c = child("c", a, [], [6], request="q", choice=1, prompt_turn="b", prompt_tokens=4, messages=b"[]")
    store = MemoryStore(Limits())
    await store.add(Session(id="r", created=1.0, used=1.0), [a, b, c], [[], [], []])
    rows, _ = await _exported(store)
    assert [row["completion_ids"] for row in rows] == [[2, 3, 4, 5], [2, 3, 4, 6]]
    assert [row["messages"][2]["content"] for row in rows] == ["to b", "to b"]


@pytest.mark.parametrize("parquet", [False, True])
async def test_values_that_cannot_be_read_break_no_export(parquet: bool) -> None:
    odd = root("a", [1], [2], messages=b"{", message=b"\xff", tools=b"7", stop_reason=[1], routed_experts={})
    store, file = MemoryStore(Limits()), io.BytesIO()
    await store.add(Session(id="r", created=1.0, used=1.0, metadata=b"{"), [odd], [[]])
    layout = LAYOUTS["plain"]
    report = await export(store, Parquet(file, layout) if parquet else JsonLines(file), layout)
    assert (report.samples, report.refused.total()) == (1, 0)
    if parquet:
        [row] = pyarrow.parquet.read_table(io.BytesIO(file.getvalue())).to_pylist()
        row = {
            name: json.loads(row[name]) if kind == "json" else row[name]
            for name, kind in layout.columns.items()
        }
    else:
        row = json.loads(file.getvalue())
    assert [row[name] for name in ("messages", "tools", "metadata")] == [None, None, None]
    assert [row["turns"][0][name] for name in ("stop_reason", "routed_experts")] == [None, None]
    assert (row["completion_ids"], row["loss_mask"]) == ([2], [1])


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


def test_without_pyarrow_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ParquetMissing, match=r"pip install 'tokenproxy\[parquet\]'"):
        Parquet(io.BytesIO(), LAYOUTS["plain"])


def test_the_table() -> None:
    report = Report(3, 4, 10, 1, Counter({"media": 2, "no_logprobs": 1}))
    lines = [line.split(maxsplit=2) for line in table(report, "out.jsonl").splitlines()]
    assert lines[:3] == [
        ["rollouts", "3"],
        ["samples", "4", "to out.jsonl; 10 ids to train on"],
        ["no", "reward", "1  these samples have no reward"],
    ]
    assert [line[:2] for line in lines[3:]] == [["refused", "3"], ["media", "2"], ["no_logprobs", "1"]]
    assert lines[-1][2] == "the engine returned no log-probabilities"
    assert "no reward" not in table(Report(1, 1, 1), "-")
    assert table(Report(), "x").startswith("nothing to export")
