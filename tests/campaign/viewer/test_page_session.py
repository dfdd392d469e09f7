"""One session in the page: its tree, conversation, tokens and drift lane."""

import re
from typing import Any

import pytest

from tests.support.tiny_model import TinyModel
from tests.support.trees import child, root
from tests.support.viewer.browser import DARK, PHONE, PageOptions, Viewer, axe_is_installed
from tests.support.viewer.small_session import SMALL, SmallSession
from tokenproxy.record.store import Session, Store
from tokenproxy.record.turn import IndexedTurn, WeightSpan, new_id, pack_alternatives

_SERIOUS = ("serious", "critical")


async def test_a_broken_prompt_is_compared_with_the_turn_before(viewer: Viewer, small: SmallSession) -> None:
    await viewer.open_tokens(SMALL, small.broken.id)
    await viewer.page.get_by_label("Prompt compared").select_option(small.broken.id)
    await viewer.page.wait_for_function(
        "() => document.querySelector('.token-panel > .status').textContent.includes('turn before')"
    )
    await viewer.page.get_by_label("Drift lane").select_option("none")
    await viewer.page.wait_for_function("() => document.querySelectorAll('.lane').length === 0")


async def test_uncertain_weights_are_not_shown_as_one_version(viewer: Viewer, recorded_store: Store) -> None:
    spans, name = (WeightSpan("7", 0, 2), WeightSpan("8", 0, 2)), "7 or 8"
    known = (WeightSpan("7", 0, 1), WeightSpan("8", 1, 2))
    first = root(new_id(), [1], [74, 75], rollout="updated", weight_versions=known, message=b"{}")
    fields: dict[str, Any] = {"rollout": "updated", "weight_versions": spans, "weights_uncertain": True}
    second = child(new_id(), first, [76], [77, 78], message=b"{}", **fields)
    await recorded_store.add(
        Session(id="updated", created=1.0, used=1.0), [IndexedTurn(first), IndexedTurn(second)]
    )
    await viewer.open("#/s/updated/-/tokens?token=5")
    await viewer.page.wait_for_selector("#token-5")
    await viewer.page.get_by_label("Colours").select_option("weights")
    legend = viewer.page.locator(".legends .token")
    assert await legend.all_inner_texts() == ["7", "8", name]
    assert "not known which" in (await legend.last.get_attribute("title") or "")
    shown = await viewer.page.locator(".tokens .token").evaluate_all(
        "tokens => tokens.map((token) => token.className.match(/masked|version-\\w+/)[0])"
    )
    unsure = "version-uncertain"
    assert shown == ["masked", "version-0", "version-1", "masked", unsure, unsure]
    assert f"{name}: not known which" in await viewer.text(".details")
    await viewer.page.hover("#token-5")
    assert f"weights {name}, not known which" in await viewer.text(".tip")


async def test_alternatives_are_in_the_details(
    viewer: Viewer, recorded_store: Store, tiny_model: TinyModel
) -> None:
    found = pack_alternatives([[(b" the", -0.25), (b"\xf0\x9f", -1.5)]])
    turn = root(new_id(), [1, 74], [75], rollout="alternatives", alternatives=found, messages=b"[]")
    session = Session(id="alternatives", created=1.0, used=1.0)
    await recorded_store.add(session, [IndexedTurn(turn)])
    await viewer.open("#/s/alternatives/-/tokens?token=2")
    await viewer.page.wait_for_selector(".details caption")
    rows = await viewer.page.locator(".details tr").all_inner_texts()
    half = "\u2039f0\u203a\u20399f\u203a"
    assert [row.split("\t")[:2] for row in rows] == [["·the", "-0.250"], [half, "-1.500"]]


async def test_find_copies_and_permalinks(viewer: Viewer, small: SmallSession) -> None:
    await viewer.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await viewer.open_tokens(SMALL, small.fork.id)
    page = viewer.page
    await page.get_by_label("Find text").fill("coding AGENT")
    await page.keyboard.press("Enter")
    await page.wait_for_selector(".token.focused")
    await page.locator(".tokens").focus()
    for _ in range(3):
        await page.keyboard.press("Shift+ArrowRight")
    assert await page.locator(".token.selected").count() == 4
    await page.click("text=copy text")
    copied = await page.evaluate("navigator.clipboard.readText()")
    assert copied and copied in "You are a coding agent."
    await page.click("text=copy ids")
    ids = await page.evaluate("navigator.clipboard.readText()")
    assert len(ids.strip("[]").split(",")) == 4
    link = await page.locator(".details a").get_attribute("href")
    assert link is not None and re.search(r"\?token=\d+$", link)
    await viewer.open(link)
    focused = page.locator(".token.focused")
    await focused.wait_for()
    assert await focused.get_attribute("data-i") == link.rpartition("=")[2]
    await page.get_by_label("Find text").fill("#999999")
    await page.keyboard.press("Enter")
    assert "Not found" in await viewer.text(".token-panel > .status")


async def test_keys_lead_everywhere(viewer: Viewer, small: SmallSession) -> None:
    await viewer.open(f"#/s/{SMALL}/{small.first.id}/conversation")
    page = viewer.page
    await page.wait_for_selector(".conversation .turn")
    for key, selector in [("t", ".tokens"), ("p", ".plot"), ("c", ".conversation")]:
        await page.keyboard.press(key)
        await page.wait_for_selector(selector)
    before = page.url
    await page.keyboard.press("j")
    await page.wait_for_function(f"() => location.href !== {before!r}")
    await page.keyboard.press("]")
    await page.keyboard.press("?")
    assert await page.locator("dialog").is_visible()
    await page.keyboard.press("Escape")
    await page.locator(".windowed").focus()
    await page.keyboard.press("End")
    await page.keyboard.press("Enter")
    await page.keyboard.press("g")
    await page.wait_for_selector(".list-row")


@pytest.mark.parametrize("page_options", [PageOptions(), DARK, PHONE], ids=["light", "dark", "phone"])
@pytest.mark.parametrize("view", ["conversation", "tokens", "plots"])
@pytest.mark.skipif(not axe_is_installed(), reason="no axe-core: run scripts/install-programs axe-core")
async def test_axe_finds_no_serious_fault(viewer: Viewer, small: SmallSession, view: str) -> None:
    await viewer.open(f"#/s/{SMALL}/{small.aborted.id}/{view}")
    await viewer.page.wait_for_selector({"tokens": ".token.sampled", "plots": ".plot"}.get(view, ".message"))
    if view == "tokens":
        await viewer.page.click(".token.sampled")
    found = await viewer.accessibility_violations()
    assert [fault for fault in found if any(kind in fault for kind in _SERIOUS)] == []


@pytest.mark.parametrize("page_options", [PageOptions(width=400, height=800)], ids=["narrow"])
async def test_nothing_is_wider_than_400_px(viewer: Viewer, small: SmallSession) -> None:
    for view, selector in (("conversation", ".message"), ("tokens", ".token.sampled"), ("plots", ".plot")):
        await viewer.open(f"#/s/{SMALL}/{small.aborted.id}/{view}")
        await viewer.page.wait_for_selector(selector)
        assert await viewer.page.evaluate("document.documentElement.scrollWidth") <= 400
    for fragment in ("#/", "#/?fold=step"):
        await viewer.open(fragment)
        await viewer.page.wait_for_selector(".list-row" + (".folds" if "fold" in fragment else ""))
        assert await viewer.page.evaluate("document.documentElement.scrollWidth") <= 400
