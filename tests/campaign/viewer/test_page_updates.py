"""What a reader has chosen stays while sessions change, and what changed is shown."""

from typing import Any
from unittest import mock

from tests.support.trees import child, root
from tests.support.viewer.browser import Viewer
from tokenproxy.record.store import Session, Store
from tokenproxy.record.turn import IndexedTurn, Turn, new_id

_EMPTY: dict[str, Any] = {"message": b"{}", "messages": b"[]"}


async def _record(store: Store, turn: Turn, used: float) -> None:
    """Record a turn, used at a time."""
    with mock.patch("time.time", lambda: used):
        await store.add(Session(id=turn.rollout, created=1.0), [IndexedTurn(turn)])


async def _three_sessions(store: Store, prefix: str) -> list[Turn]:
    """Sessions that end with 0, 1 and 2; the list shows the last one first."""
    turns = [root(new_id(), [1, 74], [75], rollout=f"{prefix}-{i}", **_EMPTY) for i in range(3)]
    for used, turn in enumerate(turns, start=1):
        await _record(store, turn, float(used))
    return turns


async def _open_list(viewer: Viewer, prefix: str) -> None:
    await viewer.open(f"#/?search={prefix}")
    await viewer.page.wait_for_function("() => document.querySelectorAll('.list-row').length === 3")


async def test_the_active_row_stays_with_its_session(viewer: Viewer, recorded_store: Store) -> None:
    turns = await _three_sessions(recorded_store, "moving")
    await _open_list(viewer, "moving")
    await viewer.page.keyboard.press("j")
    await viewer.page.keyboard.press("j")
    used = child(new_id(), turns[0], [7], [8], rollout="moving-0", **_EMPTY)
    await _record(recorded_store, used, 9.0)
    await viewer.page.wait_for_selector(".list-row[data-session='moving-0'][id$='-0']")
    assert await viewer.shown(".list-row", "session") == ["moving-0", "moving-2", "moving-1"]
    active = viewer.page.locator(".list-row[aria-selected='true']")
    assert await active.get_attribute("data-session") == "moving-1"
    grid = viewer.page.get_by_role("grid")
    assert await grid.get_attribute("aria-activedescendant") == await active.get_attribute("id")
    await viewer.page.keyboard.press("Enter")
    await viewer.page.wait_for_function("() => location.hash === '#/s/moving-1'")


async def test_sessions_are_chosen_with_the_keyboard(viewer: Viewer, recorded_store: Store) -> None:
    await _three_sessions(recorded_store, "spaced")
    await _open_list(viewer, "spaced")
    for key in ("j", "Space", "j", "Space", "j", "Space", "Space"):
        await viewer.page.keyboard.press(key)
    assert await viewer.shown(".list-row:has(input:checked)", "session") == ["spaced-2", "spaced-1"]
    await viewer.page.click("text=compare 2")
    await viewer.page.wait_for_function("() => document.querySelectorAll('.column').length === 2")


async def test_the_search_keeps_the_focus_and_follows_the_address(
    viewer: Viewer, recorded_store: Store
) -> None:
    page = viewer.page
    turns = await _three_sessions(recorded_store, "searched")
    await _open_list(viewer, "searched")
    await page.get_by_label("Search sessions").fill("searched-1")
    await page.wait_for_function("() => document.querySelectorAll('.list-row').length === 1")
    await _record(recorded_store, child(new_id(), turns[1], [7], [8], rollout="searched-1", **_EMPTY), 9.0)
    await page.wait_for_selector(".list-row[data-session='searched-1']:has(.turns:text-is('2'))")
    assert await page.evaluate("document.activeElement.ariaLabel") == "Search sessions"
    await page.go_back()
    await page.wait_for_function("() => document.querySelectorAll('.list-row').length === 3")
    assert await page.get_by_label("Search sessions").input_value() == "searched"
