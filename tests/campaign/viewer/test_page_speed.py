"""The page with 128,000 ids, with 2,000 turns and with 100,000 sessions: it never makes a reader wait.

The limits are those of a reader, several times what a machine of two cores needs.
"""

import pytest

from tests.support.viewer.browser import Viewer
from tests.support.viewer.measure import Frames, load_times, page_memory, scroll_through
from tests.support.viewer.recordings import DEEP, LONG, MANY_SESSIONS

FIRST_PAINT_MS = 1000.0
FRAME_MS = 100.0
MEMORY_BYTES = 300 * 10**6
_SHOWN = {"tokens": (".token.sampled", ".tokens"), "conversation": (".message", ".conversation")}


def _told(frames: Frames) -> str:
    return f"longest frame {frames.longest_ms:.0f} ms of {len(frames.durations_ms)}"


@pytest.mark.parametrize("view", _SHOWN)
@pytest.mark.parametrize("session", [LONG, DEEP])
async def test_a_large_session(viewer: Viewer, session: str, view: str) -> None:
    filled, scrolled = _SHOWN[view]
    times = await load_times(viewer, f"#/s/{session}/-/{view}", filled)
    assert times.first_contentful_paint_ms < FIRST_PAINT_MS, times
    await viewer.page.wait_for_timeout(1500)
    frames = await scroll_through(viewer.page, scrolled)
    assert frames.longest_ms < FRAME_MS, _told(frames)
    memory = await page_memory(viewer.page)
    assert memory.heap_bytes < MEMORY_BYTES, memory
    print(f"\n  {session} {view}: {times}, {_told(frames)}, {memory}")


async def test_the_tree_of_2000_turns(viewer: Viewer) -> None:
    await viewer.open(f"#/s/{DEEP}")
    await viewer.page.wait_for_selector(".tree-row")
    frames = await scroll_through(viewer.page, ".windowed")
    assert frames.longest_ms < FRAME_MS, _told(frames)


@pytest.mark.parametrize("recorded", ["many"], indirect=True)
async def test_a_list_of_100_000_sessions(viewer: Viewer) -> None:
    times = await load_times(viewer, "#/", ".list-row")
    assert times.first_contentful_paint_ms < FIRST_PAINT_MS, times
    page = viewer.page
    frames = await scroll_through(page, ".windowed")
    assert frames.longest_ms < FRAME_MS, _told(frames)
    # while the proxy still reads sessions, the page goes on
    await page.get_by_label("Order by").select_option("reward")
    await page.wait_for_function("() => location.hash.includes('sort=reward')")
    await page.wait_for_selector(f".status:text-matches('of {MANY_SESSIONS:,} sessions$')", timeout=280_000)
    again = await scroll_through(page, ".windowed")
    assert again.longest_ms < FRAME_MS, _told(again)
    memory = await page_memory(page)
    assert memory.heap_bytes < MEMORY_BYTES, memory
    print(f"\n  100,000 sessions: {times}, {_told(frames)}, {_told(again)}, {memory}")
