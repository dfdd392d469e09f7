"""The list of sessions, comparing sessions, keys, and a page that is one file."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import httpx
import pytest

from proxy.cli import main
from proxy.key_command import add_key
from tests.support.fake_vllm import FakeVllm
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy
from tests.support.viewer.browser import DARK, PageOptions, Viewer, axe_is_installed
from tests.support.viewer.proxies import RecordedProxy
from tests.support.viewer.recordings import HOSTILE
from tests.support.viewer.small_session import SMALL, SmallSession, small_session

OpenPage = Callable[..., AbstractAsyncContextManager[Viewer]]
_NAMES = "rows => rows.map((row) => row.dataset.session)"
_SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def small(viewer_model: TinyModel) -> SmallSession:
    return small_session(viewer_model)


async def _listed(viewer: Viewer, fragment: str) -> list[str]:
    """The names in the list, once all sessions were read."""
    await viewer.page.goto("about:blank")  # nothing of another list is left
    await viewer.open(fragment)
    await viewer.page.wait_for_function(
        "() => /sessions$|^No sessions/.test(document.querySelector('.list > .status')?.textContent ?? '')"
    )
    names: list[str] = await viewer.page.locator(".list-row").evaluate_all(_NAMES)
    return names


async def test_filters_and_order_are_in_the_address(viewer: Viewer) -> None:
    assert SMALL in await _listed(viewer, "#/")
    assert await _listed(viewer, "#/?reason=history_edited&search=small") == [SMALL]
    assert await _listed(viewer, "#/?metadata=task%3Dfix-test") == [SMALL]
    assert SMALL in await _listed(viewer, "#/?drift=true")
    assert SMALL in await _listed(viewer, "#/?problem=usage_mismatch")
    assert await _listed(viewer, "#/?reward_min=0.7&reward_max=0.8&search=small") == [SMALL]
    by_turns = await _listed(viewer, "#/?sort=turns&order=desc")
    assert by_turns[0] == "deep"
    assert (await _listed(viewer, "#/?sort=turns&order=asc"))[0] != "deep"


async def test_the_filters_can_be_used(viewer: Viewer) -> None:
    await _listed(viewer, "#/")
    page = viewer.page
    await page.keyboard.press("/")
    await page.keyboard.type("SMALL")
    await page.wait_for_function("() => document.querySelectorAll('.list-row').length === 1")
    assert "search=SMALL" in page.url
    await page.get_by_label("reason").select_option("history_edited")
    await page.wait_for_function("() => location.hash.includes('reason=history_edited')")
    await page.click("text=clear")
    await page.wait_for_function("() => document.querySelectorAll('.list-row').length > 1")
    await page.get_by_label("Order by").select_option("reward")
    await page.get_by_label("Descending").click()
    await page.wait_for_function("() => location.hash.includes('order=asc')")


async def test_a_row_tells_what_is_in_the_session(viewer: Viewer) -> None:
    await _listed(viewer, "#/?search=small")
    row = await viewer.text(f".list-row[data-session='{SMALL}']")
    for part in (
        "drift 1",
        "history_edited",
        "usage_mismatch",
        "subagent",
        "aborted 1",
        "11 turns",
        "0.75",
        "task=fix-test",
    ):
        assert part in row
    await viewer.page.locator(".windowed").focus()
    await viewer.page.keyboard.press("ArrowDown")
    await viewer.page.keyboard.press("Enter")
    await viewer.page.wait_for_selector(".tree-row")


async def test_the_list_grows_while_it_is_open(viewer: Viewer, recorded: RecordedProxy) -> None:
    await _listed(viewer, "#/?search=newcomer")
    async with httpx.AsyncClient(base_url=recorded.url, trust_env=False) as client:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        await client.post("/v1/chat/completions", json=body, headers={"x-session-id": "newcomer"})
        await viewer.page.wait_for_selector(".list-row[data-session='newcomer']")
        await client.post("/v1/sessions/newcomer/reward", json={"reward": 0.125})
        await viewer.page.wait_for_selector(".list-reward:text('0.125')")
        await client.delete("/v1/sessions/newcomer")


async def test_the_plots_are_drawn(viewer: Viewer) -> None:
    await _listed(viewer, "#/")
    await viewer.page.click("summary")
    await viewer.page.wait_for_selector(".plot svg path")
    labels = await viewer.page.locator(".plot svg").evaluate_all(
        "plots => plots.map((plot) => plot.getAttribute('aria-label'))"
    )
    assert any("Rewards" in label for label in labels) and any("Reasons" in label for label in labels)


async def test_two_paths_side_by_side(viewer: Viewer, small: SmallSession) -> None:
    left, right = small.special.id, small.aborted.id
    await viewer.open(f"#/compare/{SMALL}/{left}/{SMALL}/{right}")
    page = viewer.page
    await page.wait_for_selector(".token.first-difference")
    differs = small.fork.prompt_tokens
    fork, other = small.fork.completion, small.other_choice.completion
    while fork[:4] == other[:4]:
        fork, other, differs = fork[4:], other[4:], differs + 1
    marked = await page.locator(".token.first-difference").evaluate_all(
        "tokens => tokens.map((token) => Number(token.dataset.i))"
    )
    assert marked == [differs, differs]
    assert await page.locator("[id$='-token-0']").count() == 0
    assert "reward -0.5" in await viewer.text(".columns")
    await page.click(".compare .tools button:has-text('equal ids before')")
    await page.locator(".tokens").first.evaluate("node => { node.scrollTop = 0; }")
    await page.wait_for_selector("#column-0-token-0")
    ids = await page.locator(".column [id]").evaluate_all("nodes => nodes.map((node) => node.id)")
    assert len(ids) == len(set(ids))
    await page.locator(".tokens").last.focus()
    await page.keyboard.press("ArrowRight")
    active = await page.locator(".tokens").last.get_attribute("aria-activedescendant")
    assert active is not None and await page.locator(f".column:last-child .focused#{active}").count() == 1


async def test_sessions_of_the_list_are_compared(viewer: Viewer) -> None:
    await _listed(viewer, "#/")
    for name in (SMALL, HOSTILE):
        await viewer.page.get_by_label(f"Choose {name} for a comparison").check()
    await viewer.page.click("text=compare 2")
    await viewer.page.wait_for_selector(".column")
    assert await viewer.page.locator(".column").count() == 2


@pytest.mark.parametrize("page_options", [PageOptions(), DARK], ids=["light", "dark"])
@pytest.mark.parametrize("fragment", ["#/", "#/compare/small/-/hostile/-"], ids=["list", "compare"])
@pytest.mark.skipif(not axe_is_installed(), reason="no axe-core: run scripts/install-programs axe-core")
async def test_axe_finds_no_serious_fault(viewer: Viewer, fragment: str) -> None:
    await viewer.open(fragment)
    await viewer.page.wait_for_selector(".list-row, .column .token")
    found = await viewer.accessibility_violations()
    assert [fault for fault in found if any(kind in fault for kind in _SERIOUS)] == []


async def test_the_page_asks_for_a_key(open_page: OpenPage, viewer_model: TinyModel, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    key = add_key(file, "reader", ["read"], None)
    settings = {"api_key_file": file, "store": f"sqlite://{tmp_path / 'rollouts.db'}"}
    with FakeVllm(viewer_model) as engine, run_proxy([engine], reader=key, **settings) as client:
        url = str(client.base_url).rstrip("/")
        async with open_page(url) as viewer:
            response = await viewer.page.goto(f"{url}/viewer")
            assert response is not None and response.status == 401
            await viewer.page.wait_for_selector(".problem-bar input:focus")
            await viewer.page.keyboard.type("wr")
            await viewer.page.wait_for_timeout(2500)  # longer than the list waits before it asks again
            await viewer.page.keyboard.type("ong")
            assert await viewer.page.get_by_label("API key").input_value() == "wrong"
            await viewer.page.keyboard.press("Enter")
            await viewer.page.wait_for_selector(".problem-bar input:focus:placeholder-shown")
            await viewer.page.get_by_label("API key").fill(key)
            await viewer.page.keyboard.press("Enter")
            await viewer.page.wait_for_selector(".status:text('No sessions yet')")
            problems = await viewer.take_problems()
            assert all("401" in problem for problem in problems), problems


async def test_one_file_shows_the_same_and_contacts_nobody(
    open_page: OpenPage, recorded: RecordedProxy, small: SmallSession, tmp_path: Path
) -> None:
    out = tmp_path / "page.html"
    assert main(["view", SMALL, HOSTILE, "--url", recorded.url, "-o", str(out)]) == 0
    async with open_page("file://") as viewer:
        page = viewer.page
        await page.goto(out.as_uri())
        await page.wait_for_selector(".list-row")
        assert await page.locator(".list-row").count() == 2
        await page.goto(f"{out.as_uri()}#/s/{SMALL}/{small.aborted.id}/tokens")
        await page.wait_for_selector(".token.sampled")
        await page.wait_for_selector(".status:text('differs from')")
        await page.click("text=next difference")
        await page.wait_for_selector(".lane")
        await page.goto(f"{out.as_uri()}#/s/{HOSTILE}")
        await page.wait_for_selector(".message")
        assert await page.evaluate("window.hostileRan") is None
