"""The page with 128,000 ids, with 2,000 turns and with 100,000 sessions: it never makes a reader wait.

The limits are those of a reader, several times what a machine of two cores needs.
"""

import pytest

from tests.support.viewer.browser import Viewer
from tests.support.viewer.measure import first_paint_ms, heap_bytes, longest_frame_ms
from tests.support.viewer.recordings import DEEP, FIRST_OF_MANY, LONG

FIRST_PAINT_MS = 1000.0
FRAME_MS = 100.0
MEMORY_BYTES = 300 * 10**6
_SHOWN = {"tokens": (".token.sampled", ".tokens"), "conversation": (".message", ".conversation")}


@pytest.mark.parametrize("view", _SHOWN)
@pytest.mark.parametrize("session", [LONG, DEEP])
async def test_a_large_session(viewer: Viewer, session: str, view: str) -> None:
    filled, scrolled = _SHOWN[view]
    assert await first_paint_ms(viewer, f"#/s/{session}/-/{view}", filled) < FIRST_PAINT_MS
    await viewer.page.wait_for_timeout(1500)
    assert await longest_frame_ms(viewer.page, scrolled) < FRAME_MS
    assert await heap_bytes(viewer.page) < MEMORY_BYTES


async def test_the_tree_of_2000_turns(viewer: Viewer) -> None:
    await viewer.open(f"#/s/{DEEP}")
    await viewer.page.wait_for_selector(".tree-row")
    assert await longest_frame_ms(viewer.page, ".windowed") < FRAME_MS


@pytest.mark.parametrize("recorded", ["many"], indirect=True)
async def test_a_list_of_100_000_sessions(viewer: Viewer) -> None:
    assert await first_paint_ms(viewer, "#/", ".list-row") < FIRST_PAINT_MS
    page = viewer.page
    assert await longest_frame_ms(page, ".windowed") < FRAME_MS
    await page.click("text=older")
    await page.wait_for_selector("button:text('newest')")
    await page.get_by_label("Search sessions").fill(FIRST_OF_MANY)
    await page.wait_for_selector(f".list-row[data-session='{FIRST_OF_MANY}']")
    assert await heap_bytes(page) < MEMORY_BYTES
