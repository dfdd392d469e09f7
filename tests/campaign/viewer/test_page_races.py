"""Quick readers, slow answers and odd addresses: the page shows what the last address names."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tests.support.trees import child, root
from tests.support.viewer.browser import Viewer
from tests.support.viewer.small_session import SMALL, SmallSession
from tokenproxy.record.store import Session, Store
from tokenproxy.record.turn import IndexedTurn, new_id

if TYPE_CHECKING:
    from playwright.async_api import Route


@asynccontextmanager
async def _held(viewer: Viewer, pattern: str) -> AsyncIterator[asyncio.Event]:
    """Requests for a path wait until the event is set, and fail then."""
    released = asyncio.Event()

    async def hold(route: "Route") -> None:
        await released.wait()
        await route.fulfill(status=503, json={"error": {"message": "too slow"}})

    await viewer.page.route(re.compile(pattern), hold)
    try:
        yield released
    finally:
        released.set()
        await viewer.page.unroute(re.compile(pattern))


async def _go(viewer: Viewer, fragment: str) -> None:
    await viewer.page.evaluate("fragment => { location.hash = fragment; }", fragment)


async def test_a_late_failure_of_another_path_is_dropped(viewer: Viewer, small: SmallSession) -> None:
    await viewer.open(f"#/s/{SMALL}")
    await viewer.page.wait_for_selector(".tree-row")
    async with _held(viewer, f"tokens.turn={small.special.id}") as released:
        await _go(viewer, f"#/s/{SMALL}/{small.special.id}/tokens")
        await viewer.page.wait_for_selector(".token-panel .hint")
        await _go(viewer, f"#/s/{SMALL}/{small.aborted.id}/tokens")
        await viewer.page.wait_for_selector(".token.sampled")
        async with viewer.page.expect_response(re.compile("tokens.turn")):
            released.set()
        await viewer.page.wait_for_timeout(200)
    assert await viewer.page.locator(".token.sampled").count() > 0
    assert await viewer.page.locator(".problem-bar").is_hidden()
    await viewer.take_problems()


async def test_a_turn_that_the_session_does_not_have_is_told(viewer: Viewer, recorded_store: Store) -> None:
    name, page = "missing", viewer.page
    first = root(new_id(), [1], [5], rollout=name, message=b"{}", messages=b"[]")
    second = root(new_id(), [2], [6], rollout=name, message=b"{}", messages=b"[]")
    await recorded_store.add(Session(id=name, created=1.0, used=1.0), [IndexedTurn(first)])
    await viewer.open(f"#/s/{name}/{second.id}/tokens?token=1")
    await page.wait_for_selector(".token.sampled")
    notice = page.get_by_role("alert").filter(has_text=f"no turn {second.id}")
    await notice.wait_for()
    assert await page.locator(".token.focused").count() == 0
    await viewer.open(f"#/compare/{name}/{second.id}/{name}/-")
    await page.wait_for_selector(f".column:first-child:has-text('no turn {second.id}') .token")
    assert "no turn" not in await page.locator(".column").last.inner_text()
    await viewer.open(f"#/s/{name}/{second.id}/tokens?token=1")
    await notice.wait_for()
    await recorded_store.add(Session(id=name, created=1.0, used=2.0), [IndexedTurn(second)])
    await page.wait_for_selector(".token.focused[data-i='1']")
    await notice.wait_for(state="hidden")
    assert await page.locator(f".tree-row.on-path[data-turn='{second.id}']").count() == 1


async def test_a_reader_of_tokens_keeps_the_place_while_the_path_grows(
    viewer: Viewer, recorded_store: Store
) -> None:
    name = "growing-tokens"
    first = root(new_id(), [*range(3, 60)] * 60, [5, 6], rollout=name, message=b"{}", messages=b"[]")
    session = Session(id=name, created=1.0, used=1.0)
    await recorded_store.add(session, [IndexedTurn(first)])
    await viewer.open(f"#/s/{name}/-/tokens")
    await viewer.page.wait_for_selector(".token")
    await viewer.page.get_by_label("Colours").select_option("mask")
    await viewer.page.get_by_label("Find text").fill("find me")
    top = await viewer.page.evaluate("() => document.querySelector('.tokens').scrollTop = 900")
    second = child(new_id(), first, [7], [8, 9], rollout=name, message=b"{}", messages=b"[]")
    await recorded_store.add(Session(id=name, created=1.0, used=2.0), [IndexedTurn(second)])
    await viewer.page.wait_for_function(
        "() => document.querySelector('.total').textContent.includes('3,425')"
    )
    after = await viewer.page.evaluate("() => document.querySelector('.tokens').scrollTop")
    assert abs(after - top) < 30  # a row
    assert await viewer.page.get_by_label("Colours").input_value() == "mask"
    assert await viewer.page.get_by_label("Find text").input_value() == "find me"
    assert await viewer.page.locator(".tokens .token.plain").count() > 0
    assert await viewer.page.locator(".tokens .token:not(.plain)").count() == 0
