"""The viewer over a real vLLM, inside it and in front: the demo's rollouts, and what the engine renders."""

from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from openai import OpenAI

from proxy.demo.conversation import ChatRoute, StockRoute, TokenRoute, common_prefix, converse, ids_of
from proxy.demo.rollouts import compare_address, viewer_address, write_page
from proxy.demo.stack import MODEL_NAME
from proxy.demo.tools import TOOLS
from proxy.history.turn import unpack_ids
from tests.campaign.real_vllm.conftest import Served
from tests.support.viewer.browser import missing_program, run_browser, watched_page


def _quiet(line: str) -> None:
    """Takes the progress of a conversation."""


def _client(server: Served) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def _get(server: Served, path: str, **query: str) -> dict[str, Any]:
    answer = httpx.get(f"{server.url}{path}", params=query, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def _prompt(turns: list[dict[str, Any]], turn: dict[str, Any]) -> list[int]:
    """The whole prompt of a turn, of `/v1/sessions/{session}?ids=true`."""
    by_id = {each["id"]: each for each in turns}
    parent = by_id.get(turn["parent"])
    before = _prompt(turns, parent) + parent["completion_ids"] if parent else []
    prompt: list[int] = before + turn["appended_ids"]
    return prompt


@pytest.fixture(scope="module")
def held() -> dict[str, dict[str, str]]:
    """`rollouts` by the URL of the server: each holds the conversations once."""
    return {}


@pytest.fixture
def rollouts(server: Served, held: dict[str, dict[str, str]]) -> dict[str, str]:
    """The sessions of the demo's three conversations, by the name of the route."""
    if server.url in held:
        return held[server.url]
    client = _client(server)
    routes = (TokenRoute(client), ChatRoute(client), StockRoute(client))
    found = [converse(route, MODEL_NAME, progress=_quiet) for route in routes]
    assert [each.exact == each.follow_ups for each in found[:2]] == [True, True]
    assert found[2].exact < found[2].follow_ups  # the seeds of the demo drift
    held[server.url] = {each.route: each.session or "" for each in found}
    return held[server.url]


def test_the_drift_lane_is_what_the_engine_itself_renders(server: Served, rollouts: dict[str, str]) -> None:
    session = rollouts["chat route"]
    turns = _get(server, f"/v1/sessions/{session}", ids="true")["turns"]
    messages: list[Any] = []
    differing = 0
    for turn in turns:
        messages += turn["messages"]
        body = {"model": MODEL_NAME, "messages": messages, "tools": list(TOOLS)}
        rendered = httpx.post(f"{server.engine.url}/tokenize", json=body, timeout=60).json()["tokens"]
        lane = _get(server, f"/viewer/sessions/{session}/drift", turn=turn["id"], basis="template")
        assert lane["reason"] == ""
        recorded = _prompt(turns, turn)
        equal = common_prefix(recorded, rendered)
        expected = None if recorded == rendered else equal
        assert (lane["first"], lane["count"], lane["other"]) == (expected, len(recorded), len(rendered))
        differing += expected is not None
        messages.append(turn["message"])
    assert differing > 0


def test_a_stock_conversation_shows_its_drift(server: Served, rollouts: dict[str, str]) -> None:
    session = rollouts["stock chat route"]
    recorded = _get(server, f"/v1/sessions/{session}", ids="true")["turns"]
    tree = _get(server, f"/viewer/sessions/{session}")["turns"]
    drifted = 0
    for before, now, shown in zip(recorded, recorded[1:], tree[1:], strict=False):
        seen = before["appended_ids"] + before["completion_ids"]
        equal = common_prefix(seen, now["appended_ids"])
        assert (shown["break"]["turn"], shown["break"]["equal"]) == (before["id"], equal)
        lane = _get(server, f"/viewer/sessions/{session}/drift", turn=now["id"])
        assert lane["basis"] == "before"
        assert lane["first"] == (equal if equal < len(seen) else None)
        drifted += equal < len(seen)
    assert drifted > 0
    [row] = _get(server, "/viewer/sessions", search=session)["data"]
    assert row["summary"]["drift"] == drifted


def test_alternatives_and_the_prefix_cache_are_recorded(server: Served) -> None:
    headers = {"X-Session-ID": "alternatives"}
    messages: list[Any] = [{"role": "user", "content": "Count from one to two hundred. " * 30}]
    for _ in range(2):
        completion = _client(server).chat.completions.create(
            model=MODEL_NAME,
            messages=messages,
            max_tokens=8,
            logprobs=True,
            top_logprobs=3,
            extra_headers=headers,
        )
        messages += [completion.choices[0].message.to_dict(), {"role": "user", "content": "Go on."}]
    turns = _get(server, "/v1/sessions/alternatives", ids="true")["turns"]
    assert turns[1]["cached_tokens"] >= 128
    for turn in turns:
        assert len(turn["alternatives"]) == turn["completion_tokens"]
        for logprob, found in zip(turn["logprobs"], turn["alternatives"], strict=True):
            assert len(found) >= 3
            assert max(each["logprob"] for each in found) >= logprob - 1e-6


def test_cached_ids_of_streams_are_recorded(server: Served) -> None:
    text = "Count from one to three hundred. " * 30
    name = f"cached-streams-{uuid4()}"  # the set-ups may share a store
    session = {"X-Session-ID": name}
    messages: list[Any] = [{"role": "user", "content": text}]
    for _ in range(2):
        stream = _client(server).chat.completions.create(
            model=MODEL_NAME, messages=messages, max_tokens=8, stream=True, extra_headers=session
        )
        content = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Go on."}]
    body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 8, "stream": True}
    answer = httpx.post(f"{server.url}/v1/messages", json=body, headers=session, timeout=60)
    assert answer.status_code == 200 and "message_stop" in answer.text
    first, *others = _get(server, f"/v1/sessions/{name}")["turns"]
    assert first["cached_tokens"] is not None
    assert len(others) == 2 and all(turn["cached_tokens"] >= 128 for turn in others)


async def test_the_three_conversations_side_by_side(
    server: Served, rollouts: dict[str, str], tmp_path: Path
) -> None:
    """In the running viewer and in a file, the first drifted token is marked where the ids differ."""
    if missing := missing_program():
        pytest.skip(missing)
    sessions = list(rollouts.values())
    page = write_page(server.url, "none", sessions, tmp_path)
    chat, stock = (_get(server, f"/v1/sessions/{name}", ids="true")["turns"] for name in sessions[1:])
    differs = common_prefix(_prompt(chat, chat[-1]), _prompt(stock, stock[-1]))
    async with run_browser() as browser:
        for address, origin in ((viewer_address(server.url), server.url), (page, "file://")):
            async with watched_page(browser, origin) as viewer:
                await viewer.page.goto(compare_address(address, sessions))
                await viewer.page.wait_for_selector(".token.first-difference")
                assert await viewer.page.locator(".column").count() == 3
                marked = await viewer.page.locator(".token.first-difference").evaluate_all(
                    "tokens => tokens.map((token) => Number(token.dataset.i))"
                )
                assert set(marked) == {differs}


def test_ids_of_the_page_are_those_the_client_got(server: Served) -> None:
    route = TokenRoute(_client(server))
    answer = route.next_turn([{"role": "user", "content": "Name a colour."}], model=MODEL_NAME, max_tokens=8)
    prompt, completion = ids_of(answer)
    tree = _get(server, f"/viewer/sessions/{route.session}")
    path = f"{server.url}/viewer/sessions/{route.session}/tokens"
    body = httpx.get(path, params={"turn": tree["turns"][-1]["id"]}, timeout=60).content
    start = 4 + int.from_bytes(body[:4], "little")
    assert unpack_ids(body[start : start + 4 * len(prompt + completion)]) == prompt + completion
