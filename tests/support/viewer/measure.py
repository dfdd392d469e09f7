"""Times and memory of a page: when it is painted and filled, how long its frames take, what it holds.

All times are the page's own, by `performance.now()` and `requestAnimationFrame`: what the test's process does
meanwhile is not in them, except where it uses the cores that the browser needs.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from tests.support.viewer.browser import Viewer

if TYPE_CHECKING:
    from playwright.async_api import Page

_OPEN_TIMEOUT_MS = 60_000
"""For so long a page works to show which process is its own."""

_FILLED = """
({selector, count}) => {
    const [paint] = performance.getEntriesByName('first-contentful-paint');
    if (window.filledAt === null) {
        // it was there in the frame before this one, which has been painted
        window.filledAt = performance.now();
    } else if (!window.filledAt && document.querySelectorAll(selector).length >= count) {
        window.filledAt = null;
    }
    return window.filledAt && paint ? {paint: paint.startTime, filled: window.filledAt} : null;
}
"""
_START_FRAMES = """
() => new Promise((resolve) => {
    const recorder = {times: [], running: true};
    const tick = () => {
        recorder.times.push(performance.now());
        resolve();
        if (recorder.running) requestAnimationFrame(tick);
    };
    window.frameRecorder = recorder;
    requestAnimationFrame(tick);
})
"""
_STOP_FRAMES = """
async () => {
    const recorder = window.frameRecorder;
    // the frame that the last action caused, and one after it that has begun
    await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
    recorder.running = false;
    return recorder.times;
}
"""
_SCROLL = """
async ({selector, steps}) => {
    const element = selector ? document.querySelector(selector) : document.scrollingElement;
    for (let step = 1; step <= steps; step += 1) {
        // read anew: what is shown in windows may learn its height while it scrolls
        element.scrollTop = (element.scrollHeight - element.clientHeight) * step / steps;
        await new Promise(requestAnimationFrame);
    }
    return element.scrollTop;
}
"""
_POSITION = """
(selector) => {
    const element = selector ? document.querySelector(selector) : document.scrollingElement;
    const box = element.getBoundingClientRect();
    return {
        left: element.scrollTop + element.clientHeight < element.scrollHeight - 1
            ? element.scrollHeight - element.clientHeight - element.scrollTop : 0,
        top: element.scrollTop,
        x: selector ? box.x + box.width / 2 : innerWidth / 2,
        y: selector ? box.y + Math.min(box.height, innerHeight - box.y) / 2 : innerHeight / 2,
    };
}
"""


@dataclass(frozen=True)
class LoadTimes:
    """Milliseconds after the navigation began."""

    first_contentful_paint_ms: float
    """When the first text or image was painted."""
    filled_ms: float
    """When the view showed what it was waited for, to the next frame."""


async def load_times(viewer: Viewer, fragment: str, filled: str, *, count: int = 1) -> LoadTimes:
    """Open a view in a page that holds nothing, and wait until it is filled.

    Args:
        filled: a selector of what the view shows when it is filled.
        count: how many elements it must match.

    Raises:
        playwright.async_api.TimeoutError: it is not filled after a minute.
    """
    page = viewer.page
    await page.goto("about:blank")  # else only the fragment might change, and nothing would load
    await page.goto(f"{viewer.url}/viewer{fragment}", wait_until="commit")
    found = await page.wait_for_function(
        _FILLED, arg={"selector": filled, "count": count}, polling="raf", timeout=_OPEN_TIMEOUT_MS
    )
    times = await found.json_value()
    # the first frame may be on the screen after the next one has begun
    filled_ms = max(times["filled"], times["paint"])
    return LoadTimes(times["paint"], filled_ms)


@dataclass
class Frames:
    """The frames of a page while something happened in it; empty until that has ended."""

    durations_ms: list[float] = field(default_factory=list)
    """From the start of each frame to that of the next one."""

    @property
    def longest_ms(self) -> float:
        """The longest time for which the page showed nothing new."""
        return max(self.durations_ms)


@asynccontextmanager
async def recorded_frames(page: "Page") -> AsyncIterator[Frames]:
    """Record the frames of everything that the page does in the block."""
    frames = Frames()
    await page.evaluate(_START_FRAMES)
    try:
        yield frames
    finally:
        times = await page.evaluate(_STOP_FRAMES)
        frames.durations_ms += [after - before for before, after in pairwise(times)]


async def scroll_through(page: "Page", selector: str = "", *, steps: int = 200) -> Frames:
    """Scroll an element from where it is to its end, one step a frame; 200 steps take 3.4 s.

    Args:
        selector: of what scrolls; empty for the whole page.

    Returns:
        the frames meanwhile.

    Raises:
        AssertionError: it does not scroll.
    """
    assert await distance_to_end(page, selector) > 0, f"{selector or 'the page'} does not scroll"
    async with recorded_frames(page) as frames:
        await page.evaluate(_SCROLL, {"selector": selector, "steps": steps})
    return frames


async def distance_to_end(page: "Page", selector: str = "") -> float:
    """How many CSS pixels an element can still be scrolled down."""
    left: float = (await page.evaluate(_POSITION, selector))["left"]
    return left


@dataclass(frozen=True)
class PageMemory:
    """What a page holds, after garbage was collected."""

    heap_bytes: int
    """Of JavaScript objects."""
    elements: int
    """In the document."""


async def page_memory(page: "Page") -> PageMemory:
    """Measure what a page holds now."""
    session = await page.context.new_cdp_session(page)
    try:
        await session.send("HeapProfiler.collectGarbage")
        await session.send("Performance.enable")
        metrics = (await session.send("Performance.getMetrics"))["metrics"]
    finally:
        await session.detach()
    heap = next(each["value"] for each in metrics if each["name"] == "JSHeapUsedSize")
    elements = await page.evaluate("() => document.getElementsByTagName('*').length")
    return PageMemory(int(heap), elements)
