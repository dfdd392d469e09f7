"""How long a page takes to paint and to show frames, by its own clock, and what it holds."""

from typing import TYPE_CHECKING

from tests.support.viewer.browser import Viewer

if TYPE_CHECKING:
    from playwright.async_api import Page

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


async def first_paint_ms(viewer: Viewer, fragment: str, filled: str) -> float:
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


async def longest_frame_ms(page: "Page", selector: str) -> float:
    """Scroll an element to its end, in 200 steps, one a frame; the longest time without a new frame."""
    longest: float | None = await page.evaluate(_SCROLL, {"selector": selector, "steps": 200})
    assert longest is not None, f"{selector} does not scroll"
    return longest


async def heap_bytes(page: "Page") -> int:
    """The size of a page's JavaScript objects, after garbage was collected."""
    session = await page.context.new_cdp_session(page)
    try:
        await session.send("HeapProfiler.collectGarbage")
        await session.send("Performance.enable")
        metrics = (await session.send("Performance.getMetrics"))["metrics"]
    finally:
        await session.detach()
    return int(next(each["value"] for each in metrics if each["name"] == "JSHeapUsedSize"))
