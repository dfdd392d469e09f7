"""The page with 128,000 ids, with 2,000 turns and with 10,000 sessions: it never makes a reader wait.

The limits are those of a reader, several times what a machine of two cores needs.
"""

from typing import TYPE_CHECKING

import pytest

from tests.support.viewer.browser import Viewer
from tests.support.viewer.recordings import DEEP, FIRST_OF_MANY, LONG

if TYPE_CHECKING:
    from playwright.async_api import Page

FIRST_PAINT_MS = 1000.0
FRAME_MS = 100.0
MEMORY_BYTES = 300 * 10**6
_SHOWN = {"tokens": (".token.sampled", ".tokens"), "conversation": (".message", ".conversation")}


_SCROLL = """
async ({selector, steps}) => {
    const element = document.querySelector(selector);
    const times = [await new Promise(requestAnimationFrame)];
    const next = async () => { await new Promise(requestAnimationFrame); times.push(performance.now()); };
    for (let step = 1; step <= steps; step += 1) {
        // read anew: what is shown in windows may learn its height while it scrolls
        element.scrollTop = (element.scrollHeight - element.clientHeight) * step / steps;
        await next();
    }
    await next();  // the frame that the last step caused
    return element.scrollTop > 0 ? Math.max(...times.slice(1).map((time, at) => time - times[at])) : null;
}
"""


async def _first_paint_ms(viewer: Viewer, fragment: str, filled: str) -> float:
    """Open a view in a page that holds nothing, and wait until it shows what the selector `filled` matches.

    Returns:
        when the first text or image was painted, in milliseconds after the navigation began.
    """
    await viewer.page.goto("about:blank")  # else only the fragment might change, and nothing would load
    await viewer.page.goto(f"{viewer.url}/viewer{fragment}", wait_until="commit")
    await viewer.page.wait_for_selector(filled, timeout=60_000)
    painted: float = await viewer.page.evaluate(
        "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"
    )
    return painted


async def _longest_frame_ms(page: "Page", selector: str) -> float:
    """Scroll an element to its end, in 200 steps, one a frame; the longest time without a new frame."""
    longest: float | None = await page.evaluate(_SCROLL, {"selector": selector, "steps": 200})
    assert longest is not None, f"{selector} does not scroll"
    return longest


async def _heap_bytes(page: "Page") -> int:
    """The size of a page's JavaScript objects, after garbage was collected."""
    session = await page.context.new_cdp_session(page)
    await session.send("HeapProfiler.collectGarbage")
    await session.send("Performance.enable")
    metrics = (await session.send("Performance.getMetrics"))["metrics"]
    return int(next(each["value"] for each in metrics if each["name"] == "JSHeapUsedSize"))


@pytest.mark.parametrize("view", _SHOWN)
@pytest.mark.parametrize("session", [LONG, DEEP])
async def test_a_large_session(viewer: Viewer, session: str, view: str) -> None:
    filled, scrolled = _SHOWN[view]
    assert await _first_paint_ms(viewer, f"#/s/{session}/-/{view}", filled) < FIRST_PAINT_MS
    await viewer.page.wait_for_timeout(1500)
    assert await _longest_frame_ms(viewer.page, scrolled) < FRAME_MS
    assert await _longest_frame_ms(viewer.page, ".windowed") < FRAME_MS  # the tree
    assert await _heap_bytes(viewer.page) < MEMORY_BYTES


@pytest.mark.parametrize("recorded", ["many"], indirect=True)
async def test_a_list_of_10_000_sessions(viewer: Viewer) -> None:
    assert await _first_paint_ms(viewer, "#/", ".list-row") < FIRST_PAINT_MS
    page = viewer.page
    assert await _longest_frame_ms(page, ".windowed") < FRAME_MS
    await page.click("button:text-is('older')")
    await page.wait_for_selector("button:text('newest')")
    await page.get_by_label("Search sessions").fill(FIRST_OF_MANY)
    await page.wait_for_selector(f".list-row[data-session='{FIRST_OF_MANY}']")
    assert await _heap_bytes(page) < MEMORY_BYTES
