"""The page in a browser over a real vLLM, inside it and in front: what a reader does with a rollout."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import pytest_asyncio

from proxy.cli import main
from proxy.demo.stack import MODEL_NAME, EngineProcess
from tests.campaign.real_vllm.conftest import Served, run_proxy
from tests.campaign.real_vllm.page import Rollout, open_page, wait_for_count
from tests.campaign.real_vllm.plain import user
from tests.support.viewer.browser import (
    DARK,
    PHONE,
    axe_is_installed,
    missing_program,
)

pytestmark = pytest.mark.skipif(bool(missing_program()), reason=missing_program() or "no reason")

_HOSTILE = "<script>window.hostileRan=1</script><img src=x onerror=hostileRan=2>"
_SERIOUS = ("serious", "critical")


@pytest_asyncio.fixture
async def rollout(server: Served) -> AsyncIterator[Rollout]:
    async with httpx.AsyncClient(base_url=server.url, timeout=120, trust_env=False) as http:
        name = f"page-{uuid4().hex[:12]}"
        await http.post("/v1/sessions", json={"id": name, "metadata": {"group": name}})
        yield Rollout(http, name)
        await http.delete(f"/v1/sessions/{name}")


async def test_the_list_is_live_and_filtered(server: Served, rollout: Rollout) -> None:
    first = user("Name a colour.")
    choice = await rollout.turn(first)
    async with open_page(server.url) as viewer:
        await viewer.open(f"#/?metadata=group%3D{rollout.name}")
        row = viewer.page.locator(f".list-row[data-session='{rollout.name}']")
        await row.filter(has_text="1 turns").wait_for()
        await rollout.turn(first, choice["message"], user("And another one?"))
        await row.filter(has_text="2 turns").wait_for()
        await rollout.http.post(f"/v1/sessions/{rollout.name}/reward", json={"reward": 0.375})
        await row.filter(has_text="0.375").wait_for()
        for query in (
            f"search={rollout.name}&model={MODEL_NAME}&sort=reward",
            f"search={rollout.name}&reward_min=0.3&reward_max=0.4",
            f"search={rollout.name}&reason=first_turn",
        ):
            await viewer.open(f"#/?{query}")
            await wait_for_count(viewer, ".list-row", 1)
        await viewer.open(f"#/?search={rollout.name}&drift=true")
        await viewer.page.wait_for_selector(".status:text('0 of')")
        if axe_is_installed():
            assert _serious(await viewer.accessibility_violations()) == []
        await rollout.turn(user("Look at the files."), headers={"x-openai-subagent": "review"})
        await viewer.open(f"#/?search={rollout.name}&class=subagent")
        await row.filter(has_text="3 turns").wait_for()
        await viewer.page.click("summary")
        await viewer.page.wait_for_selector(".plot svg[aria-label*='Rewards'] path")
        await viewer.page.wait_for_selector(".plot svg[aria-label*='Reasons'] path")


async def test_a_tree_with_every_kind_of_turn(server: Served, rollout: Rollout) -> None:
    first = user("Name a colour, a fruit and a town.")
    choice = await rollout.turn(first, n=2)
    second = [first, choice["message"], user("Why these?")]
    await rollout.turn(*second)
    await rollout.turn(first, choice["message"], user("Now three others."))
    await rollout.turn(user("Name a colour."), choice["message"], user("Why these?"))
    await rollout.turn(user("Look at the files."), headers={"x-openai-subagent": "collab_spawn"})
    await rollout.leave(user("Tell me a long story."))
    answer = {"choice": [_HOSTILE]}
    hostile = await rollout.turn(user("Some HTML?"), structured_outputs=answer, max_tokens=64)
    assert hostile["message"]["content"] == _HOSTILE
    tree = await _with_turns(rollout, 8)
    rewarded = tree["turns"][0]["id"]
    await rollout.http.post(f"/v1/sessions/{rollout.name}/reward", json={"reward": 0.5, "turn": rewarded})
    async with open_page(server.url) as viewer:
        page = viewer.page
        await viewer.open(f"#/s/{rollout.name}")
        await wait_for_count(viewer, ".tree-row", 8)
        shown = await viewer.text("nav.tree")
        for part in ("choice 2", "abort", "subagent", "reward 0.5", "cached", "extended", "rendered"):
            assert part in shown
        for reason in {turn["reason"] for turn in tree["turns"]} - {None, "", "first_turn"}:
            assert reason in shown
        for turn in tree["turns"]:
            row = await viewer.text(f".tree-row[data-turn='{turn['id']}']")
            assert f"{turn['reused']} + {turn['appended']} → {turn['completion_tokens']}" in row
            await page.click(f".tree-row[data-turn='{turn['id']}']")
            await page.wait_for_selector(f".conversation [data-turn='{turn['id']}']")
            assert turn["id"] in page.url
        await page.click(f".tree-row[data-turn='{_answering(tree, _HOSTILE)}']")
        await page.wait_for_selector(".conversation .message:has-text('<script>')")
        assert await page.evaluate("() => window.hostileRan") is None
        for key, selector in (("t", ".token.sampled"), ("p", ".plot svg"), ("c", ".conversation .message")):
            await page.keyboard.press(key)
            await page.wait_for_selector(selector)
            if axe_is_installed():
                assert _serious(await viewer.accessibility_violations()) == []
        assert await page.evaluate("() => window.hostileRan") is None
        await page.keyboard.press("?")
        assert await page.locator("dialog").is_visible()
        await page.keyboard.press("Escape")
        await rollout.turn(user("One more."))
        await wait_for_count(viewer, ".tree-row", 9)
    for options in (PHONE, DARK):
        async with open_page(server.url, options) as viewer:
            await viewer.open(f"#/s/{rollout.name}/-/tokens")
            await viewer.page.wait_for_selector(".token.sampled")
            width = await viewer.page.evaluate("() => document.documentElement.scrollWidth")
            assert width <= options.width
            if axe_is_installed():
                assert _serious(await viewer.accessibility_violations()) == []


async def test_tokens_are_those_that_the_client_got(server: Served, rollout: Rollout) -> None:
    choice = await rollout.turn(user("Count to five."), logprobs=True, top_logprobs=3, temperature=0.7)
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    at = len(choice["prompt_token_ids"])
    logprob = choice["logprobs"]["content"][0]["logprob"]
    async with open_page(server.url) as viewer:
        page = viewer.page
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await viewer.open(f"#/s/{rollout.name}/-/tokens?token={at}")
        await page.wait_for_selector(".token.focused.sampled")
        details = await viewer.text(".details")
        assert re.search(rf"id\s+{ids[at]}\b", details) and re.search(rf"index\s+{at}\b", details)
        assert f"{logprob:.4f}" in details
        assert await page.locator(".details table tr").count() >= 3
        await page.hover(f"#token-{at}")
        assert f"#{ids[at]} · index {at} · sampled" in await viewer.text(".tip")
        assert await page.locator(".token.special").count() > 0
        await page.evaluate("() => { document.querySelector('.tokens').scrollTop = 0; }")
        await page.click("#token-0")
        last = page.locator(f"#token-{len(ids) - 1}")
        await last.scroll_into_view_if_needed()
        await last.click(modifiers=["Shift"])
        await page.keyboard.press("y")
        await page.wait_for_selector(f".status:text('Copied the ids of {len(ids)}')")
        assert json.loads(await page.evaluate("() => navigator.clipboard.readText()")) == ids
        await page.get_by_label("Colours").select_option("logprob")
        assert await page.locator(".token.rendered:not(.masked)").count() == 0
        assert await page.locator(".tokens .token[class*='shade-']").count() == len(choice["token_ids"])
        await page.get_by_label("Find text").fill("count to")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".token.focused:text-matches('count', 'i')")


async def test_a_session_and_an_export_as_one_file(
    server: Served, rollout: Rollout, model: Path, tmp_path: Path
) -> None:
    choice = await rollout.turn(user("Name a colour."))
    await rollout.turn(user("Name a colour."), choice["message"], user("Why?"))
    samples = (await rollout.get(f"/v1/sessions/{rollout.name}/samples"))["samples"]
    export = tmp_path / "samples.jsonl"
    export.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    live, exported = tmp_path / "live.html", tmp_path / "exported.html"
    assert main(["view", rollout.name, "--url", server.url, "-o", str(live)]) == 0
    assert main(["view", str(export), "--tokenizer", str(model), "-o", str(exported)]) == 0
    sampled = len(choice["token_ids"])
    for file in (live, exported):
        async with open_page("file://") as viewer:
            await viewer.page.goto(f"{file.as_uri()}#/s/{rollout.name}/-/tokens")
            await viewer.page.wait_for_selector(".token.sampled")
            assert await viewer.page.locator(".token.sampled").count() > sampled
            assert "Name·a·colour." in "".join((await viewer.text(".tokens")).split())


async def test_a_store_and_its_exports_as_one_file(
    engines: dict[str, EngineProcess], model: Path, tmp_path: Path
) -> None:
    name, store = "exported", f"sqlite:///{tmp_path}/rollouts.db"
    with run_proxy(engines["stock"].url, "--store", store) as url:
        async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
            rollout = Rollout(http, name)
            choice = await rollout.turn(user("Name a colour."))
            last = await rollout.turn(user("Name a colour."), choice["message"], user("Why?"))
    sources = [["view", name, "--store", store]]
    for kind in ("jsonl", "parquet"):
        export = f"{tmp_path}/samples.{kind}"
        assert await asyncio.to_thread(main, ["export", "--store", store, "--out", export]) == 0
        sources.append(["view", export])
    ids = last["prompt_token_ids"] + last["token_ids"]
    for source in sources:
        file = tmp_path / "page.html"
        assert await asyncio.to_thread(main, [*source, "--tokenizer", str(model), "-o", str(file)]) == 0
        async with open_page("file://") as viewer:
            await viewer.page.goto(f"{file.as_uri()}#/s/{name}/-/tokens?token={len(ids) - 1}")
            await viewer.page.wait_for_selector(".token.focused.sampled")
            details = await viewer.text(".details")
            assert re.search(rf"id\s+{ids[-1]}\b", details)
            assert f"{len(ids)} ids" in await viewer.text(".tools")


def test_a_setting_turns_it_off(engines: dict[str, EngineProcess]) -> None:
    with run_proxy(engines["stock"].url, "--no-viewer") as url:
        for path in ("/viewer", "/viewer/static/main.js", "/viewer/sessions"):
            answer = httpx.get(f"{url}{path}", timeout=60)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "viewer_off")
        asked = {"model": MODEL_NAME, "messages": [user("Hi")], "max_tokens": 2}
        assert httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60).status_code == 200


def _serious(violations: list[str]) -> list[str]:
    return [fault for fault in violations if any(kind in fault for kind in _SERIOUS)]


async def _with_turns(rollout: Rollout, number: int) -> Any:
    """The session's turns, as soon as there are so many: an aborted one is recorded in the background."""
    async with asyncio.timeout(60):
        while True:
            tree = await rollout.get(f"/viewer/sessions/{rollout.name}")
            if len(tree["turns"]) >= number:
                break
            await asyncio.sleep(0.1)
    assert len(tree["turns"]) == number
    return tree


def _answering(tree: Any, text: str) -> str:
    """The turn with a certain answer."""
    [found] = [turn["id"] for turn in tree["turns"] if turn["message"].get("content") == text]
    assert isinstance(found, str)
    return found
