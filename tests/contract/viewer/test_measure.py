"""What is measured of a page, on a page whose times and sizes are known."""

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager

import pytest

from tests.support.utils import run_server
from tests.support.viewer.browser import Viewer
from tests.support.viewer.measure import (
    distance_to_end,
    load_times,
    page_memory,
    recorded_frames,
    renderer_pid,
    resident_bytes,
    scroll_through,
    wheel_through,
)
from tests.support.viewer.trivial_page import trivial_app

OpenPage = Callable[..., AbstractAsyncContextManager[Viewer]]
_ROWS = "#rows"


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with run_server(trivial_app()) as url:
        yield url


async def test_load_times_are_those_of_the_page(site: str, open_page: OpenPage) -> None:
    async with open_page(site) as viewer:
        times = await load_times(viewer, "#/s/NAME", ".row", count=2000)
        # the text is painted first, the rows follow 300 ms after the page is loaded
        assert 0 < times.first_contentful_paint_ms < times.filled_ms
        assert times.filled_ms >= 300
        assert await viewer.text("#view") == "#/s/NAME"


async def test_long_tasks_of_the_load_are_reported(site: str, open_page: OpenPage) -> None:
    async with open_page(site) as viewer:
        await viewer.page.add_init_script(
            "addEventListener('load', () => setTimeout(() => { const end = performance.now() + 150;"
            " while (performance.now() < end); }))"
        )
        times = await load_times(viewer, "", ".row")
        assert 150 <= max(times.long_tasks_ms) < 3000


async def test_view_is_measured_anew_although_the_page_is_open(site: str, open_page: OpenPage) -> None:
    async with open_page(site) as viewer:
        await viewer.open("#/a")
        times = await load_times(viewer, "#/b", ".row")
        assert times.filled_ms >= 300
        assert await viewer.text("#view") == "#/b"


async def test_long_frame_is_measured(site: str, open_page: OpenPage) -> None:
    async with open_page(site) as viewer:
        await viewer.open()
        async with recorded_frames(viewer.page) as frames:
            await viewer.page.wait_for_timeout(200)
            await viewer.page.evaluate("() => { setTimeout(() => block(250)); }")
            await viewer.page.wait_for_timeout(100)
        assert 250 <= frames.longest_ms < 3000
        assert 250 <= max(frames.long_tasks_ms) < 3000
        assert frames.median_ms < frames.longest_ms / 2
        assert len(frames.durations_ms) > 3


async def test_scrolling_reaches_the_end_and_its_frames_are_recorded(site: str, open_page: OpenPage) -> None:
    async with open_page(site) as viewer:
        await viewer.open()
        await viewer.page.locator(".row").first.wait_for()
        assert await distance_to_end(viewer.page, _ROWS) > 10_000
        frames = await scroll_through(viewer.page, _ROWS, steps=30)
        assert await distance_to_end(viewer.page, _ROWS) == 0
        assert len(frames.durations_ms) >= 30


async def test_what_does_not_scroll_is_not_measured(site: str, open_page: OpenPage) -> None:
    async with open_page(site) as viewer:
        await viewer.open()
        for scrolled in (scroll_through(viewer.page, "#view"), wheel_through(viewer.page)):
            with pytest.raises(AssertionError, match="does not scroll"):
                await scrolled


async def test_slow_scroll_handler_makes_long_frames(site: str, open_page: OpenPage) -> None:
    async with open_page(site) as viewer:
        await viewer.open()
        await viewer.page.locator(".row").first.wait_for()
        await viewer.page.evaluate(f"() => document.querySelector('{_ROWS}').onscroll = () => block(120)")
        assert (await scroll_through(viewer.page, _ROWS, steps=10)).longest_ms >= 120


async def test_wheel_scrolls_like_a_person(site: str, open_page: OpenPage) -> None:
    async with open_page(site) as viewer:
        await viewer.open()
        await viewer.page.locator(".row").first.wait_for()
        frames = await wheel_through(viewer.page, _ROWS, notches=20)
        await viewer.page.wait_for_function("() => document.querySelector('#rows').scrollTop > 1000")
        assert frames.durations_ms


async def test_memory_grows_by_what_the_page_keeps(site: str, open_page: OpenPage) -> None:
    mebibyte = 2**20
    async with open_page(site) as viewer:
        await viewer.open()
        await viewer.page.locator(".row").first.wait_for()
        before = await page_memory(viewer.page)
        assert before.elements > 2000
        await viewer.page.evaluate("() => { window.objects = Array.from({length: 1e6}, (_, at) => ({at})); }")
        objects = await page_memory(viewer.page)
        # a million objects of at least 12 bytes, in an array of pointers
        assert objects.heap_bytes - before.heap_bytes > 12 * mebibyte
        await viewer.page.evaluate("() => { window.bytes = new Uint8Array(100 * 2 ** 20).fill(7); }")
        arrays = await page_memory(viewer.page)
        # typed arrays are not on the heap, and in the memory of the process
        assert arrays.renderer_bytes - objects.renderer_bytes > 90 * mebibyte
        await viewer.page.evaluate("() => { window.objects = window.bytes = null; }")
        assert (await page_memory(viewer.page)).heap_bytes - before.heap_bytes < 3 * mebibyte


async def test_process_of_each_page_is_found(site: str, open_page: OpenPage) -> None:
    async with open_page(site) as first, open_page(site) as second:
        await first.open()
        await second.open()
        pids = {await renderer_pid(first.page), await renderer_pid(second.page)}
        assert len(pids) == 2
        assert all(resident_bytes(pid) > 10 * 2**20 for pid in pids)
