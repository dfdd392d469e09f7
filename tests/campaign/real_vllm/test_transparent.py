"""Plain OpenAI clients on a real vLLM: conversations stay exact with no help from them."""

import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from proxy.demo.children import group_members
from proxy.demo.stack import EngineProcess
from tests.campaign.real_vllm.conftest import FRONT, GENERATE, INSIDE, Served
from tests.campaign.real_vllm.rollouts import SERVED_BY, TOOL_OPTIONS, Talk, check_talk, drifted, open_client

BLOCK = 128
"""Ids in a block of the engine's prefix cache."""
WORDS = ("Go  on, please.\n", "Größer, 日本語 🙂?", " why\tso? ", "No. Say it again, in other words!")


def options_of(number: int) -> dict[str, Any]:
    """Half of the conversations have tools, half of each ask for their ids."""
    options: dict[str, Any] = {}
    if number & 2:
        options |= {"tools": TOOL_OPTIONS["tools"], "tool_choice": "none"}
    if number & 4:
        options["extra_body"] = {"return_token_ids": True}
    return options


async def converse(talk: Talk, turns: int) -> None:
    """Turns of a conversation; where there are tools, the model must call them in every third."""
    calls = "tools" in talk.options
    for turn in range(turns):
        options = {**TOOL_OPTIONS} if calls and turn % 3 == 0 else {}
        if turn % 2 and "extra_body" in talk.options:
            options["logprobs"] = True
        text = WORDS[turn % len(WORDS)] if turn else "How is the weather in Reykjavík, and why?"
        await talk.say(text, **options)


async def converse_at_once(
    url: str, count: int, turns: int, stack: AsyncExitStack, processes: list[int] | None = None
) -> list[Talk]:
    """Conversations side by side: streamed or not, with tools or not, in named sessions or in none."""
    talks = []
    for number in range(count):
        talk = Talk(None, stream=bool(number & 1), options=options_of(number))  # type: ignore[arg-type]
        base, name = f"{url}/v1", uuid4().hex
        if number & 8:
            talk.session = name if number & 2 else None
            base = base if number & 2 else f"{url}/sessions/{name}/v1"
        talk.client = await stack.enter_async_context(open_client(base, processes or []))
        talks.append(talk)
    await asyncio.gather(*(converse(talk, turns) for talk in talks))
    return talks


def check_cached(talk: Talk) -> None:
    """All whole blocks of the turn before come out of the engine's prefix cache.

    The id sampled last was never the engine's input, so it has no entry in the cache yet.
    """
    for before, turn in pairwise(talk.turns):
        processed = before.usage["prompt_tokens"] + before.usage["completion_tokens"]
        cached = turn.usage["prompt_tokens_details"]["cached_tokens"]
        assert cached >= (processed - 1) // BLOCK * BLOCK, (processed, cached)


def api_servers(engine: EngineProcess) -> list[int]:
    """The processes of an engine's API servers."""
    assert engine.pid is not None
    commands = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in group_members(engine.pid)}
    return [pid for pid, command in commands.items() if "APIServer" in command]


@pytest.mark.parametrize("server", [INSIDE], indirect=True)
async def test_no_turn_drifts_in_two_processes(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """16 conversations of 8 turns; each request is answered by whichever process takes its connection."""
    processes = api_servers(server.engine)
    assert len(processes) == 2
    async with AsyncExitStack() as stack:
        talks = await converse_at_once(server.url, 16, 8, stack, processes)
        drifts = await check_talks(talks)
    served = [[turn.headers[SERVED_BY] for turn in talk.turns] for talk in talks]
    counts = {process: sum(row.count(str(process)) for row in served) for process in processes}
    moved = sum(before != after for row in served for before, after in pairwise(row))
    assert sum(counts.values()) == 16 * 8 and min(counts.values()) > 0
    assert moved >= 16, "most conversations must have been continued by the other process"
    with capsys.disabled():
        shares = " and ".join(map(str, counts.values()))
        print(
            f"\n  turns by process: {shares}; {moved} of {16 * 7} continued what the other process answered"
        )
        print_drift(f"tokenproxy {INSIDE}", drifts, 16 * 7)
    assert drifts == 0


@pytest.mark.parametrize("server", [FRONT], indirect=True)
async def test_no_turn_drifts_in_front(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    async with AsyncExitStack() as stack:
        drifts = await check_talks(await converse_at_once(server.url, 8, 4, stack))
    with capsys.disabled():
        print_drift(f"tokenproxy {FRONT}", drifts, 8 * 3)
    assert drifts == 0


@pytest.mark.parametrize("server", [GENERATE], indirect=True)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_no_turn_drifts_by_the_generate_route(
    server: Served, stream: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """With tools and without; the log-probabilities are generate's."""
    async with open_client(f"{server.url}/v1") as client:
        talks = [Talk(client, stream, options_of(number)) for number in (0, 6)]
        await asyncio.gather(*(converse(talk, 3) for talk in talks))
        drifts = await check_talks(talks)
    with capsys.disabled():
        print_drift(f"tokenproxy {GENERATE}", drifts, 2 * 2)
    assert drifts == 0


async def test_the_same_on_the_stock_route(
    engines: dict[str, EngineProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    """How far it drifts is printed, not judged; only the measurement itself is checked."""
    talks = []
    async with open_client(f"{engines['stock'].url}/v1") as client:
        talks = [Talk(client, stream=bool(number & 1), options=options_of(6)) for number in range(4)]
        await asyncio.gather(*(converse(talk, 4) for talk in talks))
    seen = [[(turn.prompt_ids, turn.ids) for turn in talk.turns] for talk in talks]
    assert all(prompt and ids for turns in seen for prompt, ids in turns)
    with capsys.disabled():
        print_drift("stock vLLM", sum(map(drifted, seen)), 4 * 3)


async def check_talks(talks: list[Talk]) -> int:
    """Check the responses and the record of conversations; how many of their turns drifted."""
    drifts = 0
    for talk in talks:
        follow_ups = [turn.source for turn in talk.turns[1:]]
        assert talk.turns[0].source == "rendered: first_turn"
        assert follow_ups == ["extended"] * len(follow_ups)
        check_cached(talk)
        drifts += await check_talk(talk)
    return drifts


def print_drift(route: str, drifts: int, turns: int) -> None:
    print(f"\n  {route:<44} {drifts:>3} of {turns:>3} follow-up turns drifted")
