"""The viewer's page in Chromium: the list, a session, its tokens and drift, a comparison, keys, one file."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm
from tests.support.talk import user
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy
from tests.support.viewer.browser import Viewer, missing_program, watched_page
from tests.support.viewer.recorder import SessionRecorder, answer
from tests.support.viewer.recordings import HOSTILE, RecordedProxy, write
from tests.support.viewer.small_session import SMALL, SmallSession
from tokenproxy.cli.key import add_key
from tokenproxy.cli.main import main
from tokenproxy.record.session_rules import count_refusal
from tokenproxy.record.store import Session, Store

if TYPE_CHECKING:
    from playwright.async_api import Browser

if missing := missing_program():
    pytest.skip(missing, allow_module_level=True)

pytestmark = pytest.mark.timeout(60)
"""The first test starts the browser."""


async def test_the_tree_tells_what_became_of_each_turn(viewer: Viewer, small: SmallSession) -> None:
    await viewer.open(f"#/s/{SMALL}")
    await viewer.page.wait_for_selector(".tree-row")

    in_order = [turn.id for turn in small.recorded.turns]
    assert await viewer.shown(".tree-row", "turn") == sorted(in_order)
    straight = viewer.page.locator(".tree-row.on-path circle")
    assert len(set(await straight.evaluate_all("all => all.map((each) => each.getAttribute('cx'))"))) == 1
    for turn, words in (
        (small.aborted, ("abort", "reward -0.5")),
        (small.other_choice, ("choice 2",)),
        (small.refused, ("usage_mismatch",)),
        (small.special, ("not trained",)),
        (small.subagent, ("agent-1", "subagent")),
        (small.subagent_end, ("length",)),
        (small.broken, ("history_edited", "drift at")),
    ):
        row = await viewer.text(f".tree-row[data-turn='{turn.id}']")
        assert all(word in row for word in words), row
    reason = viewer.page.locator(f".tree-row[data-turn='{small.broken.id}'] .reason")
    assert "differs from the recorded one" in (await reason.get_attribute("title") or "")


async def test_a_path_is_chosen_in_the_tree_and_in_its_menu(viewer: Viewer, small: SmallSession) -> None:
    await viewer.open(f"#/s/{SMALL}")
    await viewer.page.click(f".tree-row[data-turn='{small.other_choice.id}']")
    path = [small.first.id, small.other_choice.id, small.aborted.id]
    assert await viewer.shown(".tree-row.on-path", "turn") == path
    assert small.other_choice.id in viewer.page.url
    await viewer.page.get_by_label("Path", exact=True).first.select_option(small.special.id)
    await viewer.page.wait_for_selector(f".conversation [data-turn='{small.special.id}']")
    path = [small.first.id, small.fork.id, small.emoji.id, small.refused.id, small.special.id]
    assert await viewer.shown(".conversation .turn", "turn") == path
    text = await viewer.text_of_turns()
    for part in ("I read the file first.", "read_file", "tests/test_list.py", "assert sum([1, 2]) == 4"):
        assert part in text


async def test_tokens_are_those_of_the_record(
    viewer: Viewer, small: SmallSession, tiny_model: TinyModel
) -> None:
    await viewer.open_tokens(SMALL, small.fork.id)
    page = viewer.page
    await page.evaluate("document.querySelector('.tokens').scrollTop = 0")
    await page.wait_for_selector("#token-0")
    appended = len(small.first.appended) // 4
    classes = [await page.locator(f"#token-{index}").get_attribute("class") for index in (0, appended)]
    assert "rendered" in (classes[0] or "") and "sampled" in (classes[1] or "")
    await page.click("#token-0")
    details = await viewer.text(".details")
    assert re.search(r"id\s+1\b", details) and "loss mask" in details and "the engine rendered it" in details
    await page.hover("#token-0")
    assert re.fullmatch(r"#1 · index 0 · .*", await viewer.text(".tip"))


async def test_half_characters_and_white_space_are_visible(viewer: Viewer, small: SmallSession) -> None:
    await viewer.open_tokens(SMALL, small.emoji.id, small.emoji.prompt_tokens)
    text = await viewer.text(".tokens")
    assert "\u2039f0\u203a\u20399f\u203a" in text.replace("\n", "") and "·" in text and "⏎" in text


async def test_the_drift_lane_shows_what_a_template_renders(viewer: Viewer, small: SmallSession) -> None:
    await viewer.open_tokens(SMALL, small.aborted.id)
    assert "differs from the template's own rendering" in await viewer.text(".token-panel > .status")
    await viewer.page.click("text=next difference")
    await viewer.page.wait_for_selector(".lane")
    assert await viewer.page.locator(".token.differs").count() > 0
    assert await viewer.page.locator(".token.first-difference").count() == 1
    assert "Difference" in await viewer.text(".details")


async def test_tokens_open_at_the_first_difference(viewer: Viewer, small: SmallSession) -> None:
    await viewer.open("#/?search=small")
    await viewer.page.click(f".list-row[data-session='{SMALL}'] .drift a")
    await viewer.page.wait_for_selector(".token.first-difference.focused")
    assert small.broken.id in viewer.page.url
    assert "the turn before" in await viewer.text(".token-panel > .status")
    await viewer.open(f"#/s/{SMALL}")
    await viewer.page.get_by_role("tab", name="tokens").click()
    await viewer.page.wait_for_selector(".token.first-difference.focused")
    assert "the template's own rendering" in await viewer.text(".token-panel > .status")


async def test_hostile_text_is_only_text(viewer: Viewer) -> None:
    await viewer.open(f"#/s/{HOSTILE}")
    page = viewer.page
    await page.wait_for_selector(".conversation .turn")
    assert "<script>" in await viewer.text_of_turns()
    for view, selector in (("tokens", ".token.sampled"), ("plots", ".plot")):
        await page.click(f".tab:text-is('{view}')")
        await page.wait_for_selector(selector)
    await viewer.open("#/")
    await page.wait_for_selector(".list-row")
    assert await page.evaluate("window.hostileRan") is None
    assert await page.locator("iframe, img, script:not([type=module])").count() == 0


async def test_an_open_session_grows(
    viewer: Viewer, recorded: RecordedProxy, recorded_store: Store, tiny_model: TinyModel
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


async def test_a_segment_leads_to_the_turn_that_caused_it(
    viewer: Viewer, recorded_store: Store, tiny_model: TinyModel
) -> None:
    record = SessionRecorder(tiny_model, "chain")
    first = record.turn([user("Fix the parser.")], answer(tiny_model, "I begin."))
    summary = (
        "The lexer knows brackets, and the parser lacks a rule for lists. Write it, then run all tests. "
        "Keep the names of the other rules, because another module imports them."
    )
    cause = record.turn([user("Sum it up.")], answer(tiny_model, summary), parent=first)
    other = record.turn(
        [user("Name it.")], answer(tiny_model, "Parser."), request_class="subagent", agent="a1"
    )
    last = record.turn([user(f"So far: {summary}")], answer(tiny_model, "Done."))
    await write(recorded_store, [record.recorded()])
    await viewer.open("#/s/chain")
    await viewer.page.wait_for_selector(".tree-row")
    assert await viewer.shown(".tree-row", "turn") == [each.id for each in (first, cause, other, last)]
    link = viewer.page.locator(f".tree-row[data-turn='{last.id}'] a.chain")
    assert await link.text_content() == "segment 1 after turn 2"
    await link.click()
    await viewer.page.wait_for_selector(f".conversation .selected[data-turn='{cause.id}']")
    await recorded_store.delete("chain")


async def test_a_problem_is_told(browser: "Browser", recorded: RecordedProxy) -> None:
    async with watched_page(browser, recorded.url) as viewer:
        await viewer.open("#/s/never-used")
        await viewer.page.wait_for_selector(".problem-bar:not([hidden])")
        assert "unknown session 'never-used'" in await viewer.text(".problem-bar")
        await viewer.take_problems()  # the browser logs the 404
        await viewer.open("#/")
        await viewer.page.wait_for_selector(".list-row")
        assert await viewer.page.locator(".problem-bar").is_hidden()


async def test_the_list_is_searched_and_opened(viewer: Viewer, small: SmallSession) -> None:
    page = viewer.page
    await viewer.open("#/?search=task%3Dfix-test")
    await page.wait_for_selector(".status:text-is('1 session')")
    heads = await page.get_by_role("columnheader").all_inner_texts()
    cells = await page.locator(f".list-row[data-session='{SMALL}'] .cell").all_inner_texts()
    row = dict(zip(heads, cells, strict=True))
    assert (row["first message"], row["last answer"]) == ("Why does the test fail?", "Now it is right.")
    assert (row["turns"], row["drift"], row["reward"]) == ("11", "1", "0.75")
    assert "task=fix-test" in row["metadata"] and " kB" in row["size"]
    search = page.get_by_label("Search sessions")
    await search.fill("")
    await page.wait_for_selector(f".list-row[data-session='{HOSTILE}']")
    await search.fill("assert sum([1, 2])")
    await page.wait_for_selector(".status:text-is('0 sessions')")
    await page.get_by_label("in messages").check()
    await page.wait_for_selector(".status:text-is('1 session')")
    assert "search=assert" in page.url
    await page.locator(".windowed").focus()
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("Enter")
    await page.click(".facts a:text('split=train')")  # the other sessions of its split
    await page.wait_for_selector(f".list-row[data-session='{SMALL}']")
    await page.click(".filter:text('split=train')")
    await page.wait_for_selector(f".list-row[data-session='{HOSTILE}']")


async def test_steps_and_groups_are_folded_with_a_curve(
    viewer: Viewer, recorded: RecordedProxy, tmp_path: Path
) -> None:
    names = [f"folded-{step}-{number}" for step in (9, 10) for number in (0, 1)]
    async with httpx.AsyncClient(base_url=recorded.url, trust_env=False) as client:
        for name in names:
            _, step, number = name.split("-")
            metadata = {"step": int(step), "group": f"{step}-a", "run": "folded"}
            await client.post("/v1/sessions", json={"id": name, "metadata": metadata})
            body = {"messages": [{"role": "user", "content": "Hi"}]}
            await client.post("/v1/chat/completions", json=body, headers={"x-session-id": name})
            reward = {"reward": float(number) if step == "10" else 0.0}
            await client.post(f"/v1/sessions/{name}/reward", json=reward)
    page = viewer.page
    await viewer.open("#/?where=run%3Dfolded")
    await page.get_by_label("Fold rollouts").select_option("step")
    await page.wait_for_selector(".list-row.folds >> nth=1")

    async def check() -> None:
        rows = await page.locator(".list-row.folds").all_inner_texts()
        assert [row.split() for row in rows if row[0] in "19"] == [
            ["10", "2", "2", "0.500", "0.500", "0", "%"],
            ["9", "2", "2", "0.000", "0.000", "0", "%"],
        ]
        rewards = page.locator(".plot:has-text('Reward by step')")
        assert "mean ± spread" in await rewards.locator("figcaption").inner_text()
        zero = await rewards.locator(".zero").get_attribute("d") or ""
        first = await rewards.locator("circle").first.get_attribute("cy")
        assert first is not None and float(first) == pytest.approx(
            float(zero.split()[1].split("H")[0]), abs=0.1
        )

    await check()
    await page.click(".list-row.folds a:text-is('10')")
    await page.click(".list-row.folds a:text-is('10-a')")  # steps show their groups, groups their rollouts
    await page.wait_for_selector(".status:text-is('2 sessions')")
    assert await viewer.shown(".list-row.rollouts", "session") == ["folded-10-1", "folded-10-0"]
    out = tmp_path / "folded.html"
    assert main(["view", *reversed(names), "--url", recorded.url, "-o", str(out)]) == 0
    viewer.url = "file://"
    await page.goto(f"{out.as_uri()}#/?fold=step")
    await page.wait_for_selector(".list-row.folds >> nth=1")
    await check()
    async with httpx.AsyncClient(base_url=recorded.url, trust_env=False) as client:
        for name in names:
            await client.delete(f"/v1/sessions/{name}")


async def test_two_paths_side_by_side(viewer: Viewer, small: SmallSession) -> None:
    left, right = small.special.id, small.aborted.id
    await viewer.open(f"#/compare/{SMALL}/{left}/{SMALL}/{right}")
    page = viewer.page
    await page.wait_for_selector(".token.first-difference")
    differs = small.fork.prompt_tokens
    fork, other = small.fork.completion, small.other_choice.completion
    while fork[:4] == other[:4]:
        fork, other, differs = fork[4:], other[4:], differs + 1
    assert await viewer.shown(".token.first-difference", "i") == [str(differs)] * 2
    assert await page.locator("[id$='-token-0']").count() == 0
    assert "reward -0.5" in await viewer.text_of_turns(".columns")
    await page.click(".compare .tools button:has-text('equal ids before')")
    await page.locator(".tokens").first.evaluate("node => { node.scrollTop = 0; }")
    await page.wait_for_selector("#column-0-token-0")
    ids = await page.locator(".column [id]").evaluate_all("nodes => nodes.map((node) => node.id)")
    assert len(ids) == len(set(ids))
    await page.locator(".tokens").last.focus()
    await page.keyboard.press("ArrowRight")
    active = await page.locator(".tokens").last.get_attribute("aria-activedescendant")
    assert active is not None and await page.locator(f".column:last-child .focused#{active}").count() == 1


async def test_the_page_asks_for_a_key(browser: "Browser", tiny_model: TinyModel, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    key = add_key(file, "reader", ["read"], None)
    settings = {"api_key_file": file, "store": f"sqlite://{tmp_path / 'rollouts.db'}"}
    with FakeVllm(tiny_model) as engine, run_proxy([engine], reader=key, **settings) as client:
        url = str(client.base_url).rstrip("/")
        async with watched_page(browser, url) as viewer:
            response = await viewer.page.goto(f"{url}/viewer")
            assert response is not None and response.status == 401
            await viewer.page.wait_for_selector(".problem-bar input:focus")
            await viewer.page.keyboard.type("wrong")
            await viewer.page.keyboard.press("Enter")
            await viewer.page.wait_for_selector(".problem-bar input:focus:placeholder-shown")
            await viewer.page.get_by_label("API key").fill(key)
            await viewer.page.keyboard.press("Enter")
            await viewer.page.wait_for_selector(".status:text('No sessions yet')")
            problems = await viewer.take_problems()
            assert all("401" in problem for problem in problems), problems


async def test_one_file_shows_the_same_and_contacts_nobody(
    browser: "Browser", recorded: RecordedProxy, small: SmallSession, tmp_path: Path
) -> None:
    out = tmp_path / "page.html"
    assert main(["view", SMALL, HOSTILE, "--url", recorded.url, "-o", str(out)]) == 0
    async with watched_page(browser, "file://") as viewer:
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


async def test_an_empty_session_tells_of_refused_requests(viewer: Viewer, recorded_store: Store) -> None:
    await recorded_store.add(Session(id="refused", created=1.0))
    await viewer.open("#/s/refused")
    await viewer.page.wait_for_selector("text=This session has no turns yet.")
    await count_refusal(recorded_store, "refused", 404, "The model `other` does not exist.")
    await viewer.page.wait_for_selector(
        "text=1 request refused, the last one: 404 The model `other` does not"
    )
    await recorded_store.delete("refused")
