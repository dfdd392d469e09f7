"""One session in the page: its tree, conversation, tokens and drift lane."""

import asyncio
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from proxy.history.store import Session, Store
from proxy.history.turn import WeightSpan, pack_alternatives
from tests.support.tiny_model import TinyModel
from tests.support.trees import child, root
from tests.support.viewer.browser import DARK, PHONE, PageOptions, Viewer, axe_is_installed
from tests.support.viewer.proxies import RecordedProxy
from tests.support.viewer.recordings import HOSTILE
from tests.support.viewer.small_session import SMALL, SmallSession, small_session

_TURNS = "nodes => nodes.map((node) => node.dataset.turn)"
_HALF = "\u2039f0\u203a\u20399f\u203a"
_SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def small(viewer_model: TinyModel) -> SmallSession:
    return small_session(viewer_model)


async def _open_tokens(viewer: Viewer, turn: str, token: int | None = None) -> None:
    await viewer.open(f"#/s/{SMALL}/{turn}/tokens" + ("" if token is None else f"?token={token}"))
    await viewer.page.wait_for_selector(".token.sampled")
    await viewer.page.wait_for_function(
        "() => document.querySelector('.token-panel > .status').textContent !== ''"
    )


async def test_the_tree_tells_what_became_of_each_turn(viewer: Viewer, small: SmallSession) -> None:
    await viewer.open(f"#/s/{SMALL}")
    await viewer.page.wait_for_selector(".tree-row")

    async def row(turn: str) -> str:
        text: str = await viewer.page.locator(f".tree-row[data-turn='{turn}']").inner_text()
        return text

    assert await viewer.page.locator(".tree-row").count() == 11
    assert "abort" in await row(small.aborted.id) and "reward -0.5" in await row(small.aborted.id)
    assert "choice 2" in await row(small.other_choice.id)
    assert "usage_mismatch" in await row(small.refused.id)
    assert "not trained" in await row(small.special.id)
    assert "agent-1" in await row(small.subagent.id) and "subagent" in await row(small.subagent.id)
    assert "length" in await row(small.subagent_end.id)
    broken = await row(small.broken.id)
    assert "history_edited" in broken and "drift at" in broken
    title = await viewer.page.locator(f".tree-row[data-turn='{small.broken.id}'] .reason").get_attribute(
        "title"
    )
    assert title is not None and "differs from the recorded one" in title


async def test_a_path_is_chosen_in_the_tree_and_in_its_menu(viewer: Viewer, small: SmallSession) -> None:
    await viewer.open(f"#/s/{SMALL}")
    await viewer.page.click(f".tree-row[data-turn='{small.other_choice.id}']")
    on_path = await viewer.page.locator(".tree-row.on-path").evaluate_all(
        "rows => rows.map(r => r.dataset.turn)"
    )
    assert on_path == [small.first.id, small.other_choice.id, small.aborted.id]
    assert small.other_choice.id in viewer.page.url
    await viewer.page.get_by_label("Path", exact=True).first.select_option(small.special.id)
    await viewer.page.wait_for_selector(f".conversation [data-turn='{small.special.id}']")
    shown = await viewer.page.locator(".conversation .turn").evaluate_all(
        "turns => turns.map(t => t.dataset.turn)"
    )
    assert shown == [small.first.id, small.fork.id, small.emoji.id, small.refused.id, small.special.id]


async def test_the_conversation_has_reasoning_calls_and_results(viewer: Viewer, small: SmallSession) -> None:
    await viewer.open(f"#/s/{SMALL}/{small.fork.id}/conversation")
    await viewer.page.wait_for_selector(".conversation .turn")
    text = await viewer.text(".conversation")
    for part in ("I read the file first.", "read_file", "tests/test_list.py", "assert sum([1, 2]) == 4"):
        assert part in text


async def test_tokens_are_those_of_the_record(
    viewer: Viewer, small: SmallSession, viewer_model: TinyModel
) -> None:
    await _open_tokens(viewer, small.fork.id)
    page = viewer.page
    await page.evaluate("document.querySelector('.tokens').scrollTop = 0")
    await page.wait_for_selector("#token-0")
    appended = len(small.first.appended) // 4
    classes = [await page.locator(f"#token-{index}").get_attribute("class") for index in (0, appended)]
    assert "rendered" in (classes[0] or "") and "sampled" in (classes[1] or "")
    await page.click("#token-0")
    details = await viewer.text(".details")
    assert re.search(r"id\s+1\b", details) and "loss mask" in details and "the engine rendered it" in details


async def test_half_characters_and_white_space_are_visible(viewer: Viewer, small: SmallSession) -> None:
    start = small.emoji.prompt_tokens
    await _open_tokens(viewer, small.emoji.id, start)
    text = await viewer.text(".tokens")
    assert _HALF in text.replace("\n", "") and "·" in text and "⏎" in text
    assert await viewer.page.locator(".token.special").count() > 0


async def test_the_drift_lane_shows_what_a_template_renders(viewer: Viewer, small: SmallSession) -> None:
    await _open_tokens(viewer, small.aborted.id)
    status = await viewer.text(".token-panel > .status")
    assert "differs from the template's own rendering" in status
    await viewer.page.click("text=next difference")
    lane = viewer.page.locator(".lane").first
    await lane.wait_for()
    assert await viewer.page.locator(".token.differs").count() > 0
    assert await viewer.page.locator(".token.first-difference").count() == 1
    details = await viewer.text(".details")
    assert "Difference" in details


async def test_a_broken_prompt_is_compared_with_the_turn_before(viewer: Viewer, small: SmallSession) -> None:
    await _open_tokens(viewer, small.broken.id)
    await viewer.page.get_by_label("Prompt compared").select_option(small.broken.id)
    await viewer.page.wait_for_function(
        "() => document.querySelector('.token-panel > .status').textContent.includes('turn before')"
    )
    await viewer.page.get_by_label("Drift lane").select_option("none")
    await viewer.page.wait_for_function("() => document.querySelectorAll('.lane').length === 0")


async def test_hovering_shows_id_index_and_logprob(viewer: Viewer, small: SmallSession) -> None:
    start = small.first.prompt_tokens
    await _open_tokens(viewer, small.first.id, start)
    await viewer.page.hover(f"#token-{start}")
    tip = await viewer.text(".tip")
    assert re.fullmatch(rf"#\d+ · index {start} · sampled · logprob -[\d.]+", tip)


@pytest.mark.parametrize(
    ("spans", "name"),
    [((WeightSpan("7", 0, 2), WeightSpan("8", 0, 2)), "7 or 8"), ((WeightSpan("8", 0, 2),), "8 or another")],
    ids=["two versions", "one version"],
)
async def test_uncertain_weights_are_not_shown_as_one_version(
    viewer: Viewer, recorded_store: Store, spans: tuple[WeightSpan, ...], name: str
) -> None:
    known = (WeightSpan("7", 0, 1), WeightSpan("8", 1, 2))
    first = root(f"{1:032x}", [1], [74, 75], rollout="updated", weight_versions=known, message=b"{}")
    fields: dict[str, Any] = {"rollout": "updated", "weight_versions": spans, "weights_uncertain": True}
    second = child(f"{2:032x}", first, [76], [77, 78], message=b"{}", **fields)
    await recorded_store.add(Session(id="updated", created=1.0, used=1.0), [first, second], [[], []])
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
    await viewer.page.goto("about:blank")
    await recorded_store.delete("updated")


_PRESSES = """
([start, pointerType, end]) => {
    const send = (name, index) => {
        const token = document.getElementById(`token-${index}`);
        const { left, top } = token.getBoundingClientRect();
        const at = { clientX: left + 2, clientY: top + 2, pointerType, bubbles: true, cancelable: true };
        token.dispatchEvent(new PointerEvent(name, at));
    };
    send('pointerdown', start);
    send('pointermove', start + 1);
    send(end, start + 1);
    send('pointermove', start + 2);
    return document.querySelectorAll('.token.selected').length;
}
"""


@pytest.mark.parametrize(
    ("pointer", "end", "selected"),
    [
        ("mouse", "pointerup", 2),
        ("mouse", "pointercancel", 2),
        ("touch", "pointerup", 1),
        ("touch", "pointercancel", 0),
    ],
)
async def test_a_drag_selects_until_it_ends(
    viewer: Viewer, small: SmallSession, pointer: str, end: str, selected: int
) -> None:
    await _open_tokens(viewer, small.first.id)
    await viewer.page.wait_for_selector(f"#token-{small.first.prompt_tokens + 2}")
    arguments = [small.first.prompt_tokens, pointer, end]
    assert await viewer.page.evaluate(_PRESSES, arguments) == selected


async def test_alternatives_are_in_the_details(
    viewer: Viewer, recorded_store: Store, viewer_model: TinyModel
) -> None:
    half = (b"\xf0\x9f", -1.5)
    found = pack_alternatives([[(b" the", -0.25), half]])
    turn = root("0" * 32, [1, 74], [75], rollout="alternatives", alternatives=found, messages=b"[]")
    session = Session(id="alternatives", created=1.0, used=1.0)
    await recorded_store.add(session, [turn], [[]])
    await viewer.open("#/s/alternatives/-/tokens?token=2")
    await viewer.page.wait_for_selector(".details caption")
    rows = await viewer.page.locator(".details tr").all_inner_texts()
    assert [row.split("\t")[:2] for row in rows] == [["·the", "-0.250"], [_HALF, "-1.500"]]
    await recorded_store.delete("alternatives")


async def test_colours_leave_out_what_is_not_trained(viewer: Viewer, small: SmallSession) -> None:
    await _open_tokens(viewer, small.special.id, small.first.prompt_tokens)
    await viewer.page.get_by_label("Colours").select_option("logprob")
    assert await viewer.page.locator(".token.appended:not(.masked)").count() == 0
    assert await viewer.page.locator(".tokens .token[class*='shade-']").count() > 0
    await viewer.page.get_by_label("Colours").select_option("mask")
    assert await viewer.page.locator(".tokens .token.trained").count() > 0


async def test_find_copies_and_permalinks(viewer: Viewer, small: SmallSession) -> None:
    await viewer.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await _open_tokens(viewer, small.fork.id)
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


async def test_hostile_text_is_only_text(viewer: Viewer) -> None:
    await viewer.open(f"#/s/{HOSTILE}")
    page = viewer.page
    await page.wait_for_selector(".conversation .turn")
    assert "<script>" in await viewer.text(".conversation")
    for view, selector in (("tokens", ".token.sampled"), ("plots", ".plot")):
        await page.click(f".tab:text-is('{view}')")
        await page.wait_for_selector(selector)
    await viewer.open("#/")
    await page.wait_for_selector(".list-row")
    assert await page.evaluate("window.hostileRan") is None
    assert await page.locator("iframe, img, script:not([type=module])").count() == 0


async def test_an_open_session_grows(
    viewer: Viewer, recorded: RecordedProxy, recorded_store: Store, viewer_model: TinyModel
) -> None:
    headers = {"x-session-id": "growing"}
    messages = [{"role": "user", "content": "Hi"}]
    async with httpx.AsyncClient(base_url=recorded.url, trust_env=False) as client:
        first = await client.post("/v1/chat/completions", json={"messages": messages}, headers=headers)
        await viewer.open("#/s/growing")
        await viewer.page.wait_for_selector(".tree-row")
        assert await viewer.page.locator(".tree-row").count() == 1
        await viewer.page.get_by_role("tab", name="tokens").click()
        await viewer.page.wait_for_selector(".token.sampled")
        messages += [first.json()["choices"][0]["message"], {"role": "user", "content": "And?"}]
        await client.post("/v1/chat/completions", json={"messages": messages}, headers=headers)
        await viewer.page.wait_for_function("() => document.querySelectorAll('.tree-row').length === 2")
        await client.post("/v1/sessions/growing/reward", json={"reward": 0.5})
        await viewer.page.wait_for_function(
            "() => document.querySelector('h1').parentNode.textContent.includes('reward 0.5')"
        )
        await client.delete("/v1/sessions/growing")


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
    await viewer.open("#/")
    await viewer.page.wait_for_selector(".list-row")
    assert await viewer.page.evaluate("document.documentElement.scrollWidth") <= 400


async def test_a_fork_names_the_turn_that_it_continues(
    viewer: Viewer, recorded_store: Store, viewer_model: TinyModel
) -> None:
    first = root(f"{1:032x}", [1, 74], [75], rollout="forks")
    turns = [first, *(child(f"{number:032x}", first, [76], [77], rollout="forks") for number in (2, 3))]
    await recorded_store.add(Session(id="forks", created=1.0, used=1.0), turns, [[], [], []])
    await viewer.open("#/s/forks")
    await viewer.page.wait_for_selector(".tree-row")
    for turn, is_fork in zip(turns, (False, False, True), strict=True):
        text = await viewer.text(f".tree-row[data-turn='{turn.id}']")
        assert ("forks turn 1" in text) is is_fork
    await recorded_store.delete("forks")


async def test_an_answer_that_comes_too_late_is_dropped(viewer: Viewer) -> None:
    asked = 0

    async def late(route: Any) -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.5)
        await route.continue_()

    await viewer.page.route(f"**/viewer/sessions/{SMALL}*", late)
    await viewer.open(f"#/s/{SMALL}")
    await viewer.open("#/")
    await viewer.page.wait_for_selector(".list-row")
    await viewer.page.wait_for_timeout(3000)  # longer than an open session waits before it asks again
    assert await viewer.page.locator(".tree-row").count() == 0
    assert asked == 1


async def test_a_problem_is_told(
    open_page: Callable[..., AbstractAsyncContextManager[Viewer]], recorded: RecordedProxy
) -> None:
    async with open_page(recorded.url) as viewer:
        await viewer.open("#/s/never-used")
        await viewer.page.wait_for_selector(".problem-bar:not([hidden])")
        assert "unknown session 'never-used'" in await viewer.text(".problem-bar")
        await viewer.take_problems()  # the browser logs the 404
        await viewer.open("#/")
        await viewer.page.wait_for_selector(".list-row")
        assert await viewer.page.locator(".problem-bar").is_hidden()
