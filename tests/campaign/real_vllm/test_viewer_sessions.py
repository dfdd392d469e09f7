"""The page over a real vLLM: keys, pages, groups, problems, half characters, stripped thinking."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import httpx
import pytest

from proxy.demo.conversation import common_prefix
from proxy.demo.stack import MODEL_NAME, EngineProcess
from tests.campaign.real_vllm.conftest import Served, run_proxy
from tests.campaign.real_vllm.page import Rollout, open_page, wait_for_count
from tests.campaign.real_vllm.plain import user
from tests.campaign.real_vllm.test_transparent_clients import THINKING
from tests.support.viewer.browser import missing_program

pytestmark = pytest.mark.skipif(bool(missing_program()), reason=missing_program() or "no reason")

_EMOJI = {10813: b"\xf0\x9f", 242: b"\x98", 218: b"\x80"}
"""The bytes of the ids of 😀, each of which is a part of the character."""
_KEYS = ("anna", "bert")


@asynccontextmanager
async def _rollout(url: str, name: str, key: str = "none") -> AsyncIterator[Rollout]:
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, headers=headers) as http:
        yield Rollout(http, f"{name}-{uuid4().hex[:12]}")


async def test_a_key_shows_the_sessions_of_its_tenant(engines: dict[str, EngineProcess]) -> None:
    flags = [flag for key in _KEYS for flag in ("--api-key", key)]
    with run_proxy(engines["stock"].url, "--store", "memory:", *flags, client_key=_KEYS[0]) as url:
        for key in _KEYS:
            async with _rollout(url, f"of-{key}", key) as rollout:
                await rollout.turn(user("Name a colour."), max_tokens=2)
        async with open_page(url) as viewer:
            response = await viewer.page.goto(f"{url}/viewer")
            assert response is not None and response.status == 401
            await viewer.page.get_by_label("API key").fill("nobody")
            await viewer.page.keyboard.press("Enter")
            await viewer.page.wait_for_selector(".problem-bar input:focus:placeholder-shown")
            await viewer.page.get_by_label("API key").fill("bert")
            await viewer.page.keyboard.press("Enter")
            await wait_for_count(viewer, ".list-row", 1)
            assert "of-bert-" in await viewer.text(".list-row")
            problems = await viewer.take_problems()
            assert problems and all("401" in problem for problem in problems)


async def test_more_sessions_than_a_page_holds(server: Served) -> None:
    async with _rollout(server.url, "many") as rollout:
        names = [f"{rollout.name}-{number:03}" for number in range(201)]
        for name in names:
            await rollout.http.post("/v1/sessions", json={"id": name})
        await Rollout(rollout.http, names[0]).turn(user("Name a colour."), max_tokens=2)
        async with open_page(server.url) as viewer:
            await viewer.open(f"#/?search={rollout.name}&sort=id&order=asc&offset=200")
            await wait_for_count(viewer, ".list-row", 1)
            assert names[200] in await viewer.text(".list-row")
            await viewer.page.click(".pager >> text=previous")
            await viewer.page.wait_for_selector(f".list-row[data-session='{names[0]}']:has-text('1 turns')")
        await asyncio.gather(*(rollout.http.delete(f"/v1/sessions/{name}") for name in names))


async def test_rollouts_of_a_group_are_compared(server: Served) -> None:
    """Two answers to one question, chosen in the list: both rewards, and the first different token."""
    async with _rollout(server.url, "group") as rollout:
        ids = []
        for number, reward in enumerate((0.25, 0.75)):
            name = f"{rollout.name}-{number}"
            await rollout.http.post("/v1/sessions", json={"id": name, "metadata": {"group": rollout.name}})
            one = Rollout(rollout.http, name)
            choice = await one.turn(user("Name a colour."), temperature=1.3, seed=number, min_tokens=4)
            ids.append(choice["prompt_token_ids"] + choice["token_ids"])
            await rollout.http.post(f"/v1/sessions/{name}/reward", json={"reward": reward})
        differs = common_prefix(*ids)
        assert differs < min(map(len, ids))  # the seeds give two answers
        async with open_page(server.url) as viewer:
            await viewer.open(f"#/?metadata=group%3D{rollout.name}")
            await wait_for_count(viewer, ".list-row", 2)
            for key in ("j", "Space", "j", "Space"):
                await viewer.page.keyboard.press(key)
            await viewer.page.click("text=compare 2")
            marked = viewer.page.locator(".token.first-difference")
            await marked.first.wait_for()
            indices = await marked.evaluate_all("tokens => tokens.map((token) => Number(token.dataset.i))")
            assert indices == [differs, differs]
            shown = await viewer.text(".columns")
            assert "reward 0.25" in shown and "reward 0.75" in shown


async def test_untrainable_turns_are_found_and_are_no_part_of_the_mask(
    engines: dict[str, EngineProcess],
) -> None:
    flags = ("--no-record-logprobs", "--store", "memory:")
    with run_proxy(engines["stock"].url, *flags) as url:
        async with _rollout(url, "unproved") as unproved, _rollout(url, "proved") as proved:
            await unproved.turn(user("Name a colour."))
            await proved.turn(user("Name a colour."), logprobs=True)
            async with open_page(url) as viewer:
                await viewer.open("#/?problem=no_logprobs")
                await wait_for_count(viewer, ".list-row", 1)
                assert unproved.name in await viewer.text(".list-row")
                for rollout, is_trained in ((unproved, False), (proved, True)):
                    await viewer.open(f"#/s/{rollout.name}/-/tokens")
                    await viewer.page.get_by_label("Colours").select_option("mask")
                    trained = viewer.page.locator(".tokens .token.trained")
                    assert (await trained.count() > 0) is is_trained


async def test_half_characters_are_shown_as_bytes(server: Served) -> None:
    async with _rollout(server.url, "half") as rollout:
        allowed: dict[str, Any] = {"allowed_token_ids": list(_EMOJI), "ignore_eos": True, "temperature": 1.5}
        choice = await rollout.turn(user("Smile!"), **allowed)
        ids, at = choice["token_ids"], len(choice["prompt_token_ids"])
        assert set(ids) <= _EMOJI.keys()
        async with open_page(server.url) as viewer:
            await viewer.open(f"#/s/{rollout.name}/-/tokens?token={at}")
            await viewer.page.wait_for_selector(".token.focused.sampled")
            shown = await viewer.page.locator(".tokens .token.sampled").evaluate_all(
                "tokens => tokens.map((token) => token.textContent)"
            )
            assert shown == ["".join(f"\u2039{byte:02x}\u203a" for byte in _EMOJI[token]) for token in ids]


async def test_stripped_thinking_is_in_the_drift_lane(mortal_engine: EngineProcess) -> None:
    """The model sees its thinking again; a server that renders the messages leaves it out."""
    async with _rollout(mortal_engine.url, "thinking") as rollout:
        first, second = user("Name a colour."), user("And another?")
        for _ in range(8):  # until the model thinks before it answers
            choice = await rollout.turn(first, **THINKING)
            if choice["message"]["reasoning"]:
                break
        assert choice["message"]["reasoning"]
        at = len(choice["prompt_token_ids"])
        after = await rollout.turn(first, choice["message"], second, **THINKING)
        prompt = after["prompt_token_ids"]
        assert prompt[at : at + len(choice["token_ids"])] == choice["token_ids"]
        asked = {"model": MODEL_NAME, "messages": [first, choice["message"], second]}
        rendered = (await rollout.http.post("/tokenize", json=asked)).json()["tokens"]
        first_difference = common_prefix(prompt, rendered)
        # the line break before the thinking may become one id with a line break after it
        assert at - 1 <= first_difference < at + len(choice["token_ids"])
        async with open_page(mortal_engine.url) as viewer:
            await viewer.open(f"#/s/{rollout.name}/-/tokens")
            await viewer.page.get_by_label("Drift lane").select_option("template")
            await viewer.page.wait_for_selector(f".token.first-difference[data-i='{first_difference}']")
            assert await viewer.page.locator(".minimap, canvas").count() > 0
