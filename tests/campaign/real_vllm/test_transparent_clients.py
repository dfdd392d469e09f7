"""Clients as they are: they rewrite what they got, send it twice, edit it, and meet servers that die.

The reasoning engine's `</think>` is made likely, so that turns have both reasoning and words after it.
"""

import asyncio
import json
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from proxy.demo.stack import EngineProcess
from tests.campaign.real_vllm.conftest import ProxyProcess, Served, run_proxy
from tests.campaign.real_vllm.rollouts import (
    TOOL_OPTIONS,
    Habit,
    Message,
    Talk,
    check_samples,
    check_seen,
    check_talk,
    open_client,
    record,
)

END_OF_REASONING = 12
"""Id of `</think>` in the reasoning engine's tokenizer."""
THINKING: dict[str, Any] = {"logit_bias": {str(END_OF_REASONING): 14}, "max_tokens": 48}


def without_reasoning(message: Message) -> Message:
    """As clients do that know OpenAI's fields only."""
    return {name: value for name, value in message.items() if not name.startswith("reasoning")}


def in_parts(message: Message) -> Message:
    """Content as a list of parts."""
    text = message.get("content")
    return {**message, "content": [{"type": "text", "text": text}]} if text else message


def stripped(message: Message) -> Message:
    """No white space around the content of assistant messages."""
    if message["role"] != "assistant" or not message.get("content"):
        return message
    return {**message, "content": message["content"].strip()}


def reordered(message: Message) -> Message:
    """Arguments as another JSON library spells them."""
    calls = []
    for call in message.get("tool_calls") or []:
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError:  # a call that was cut short
            calls.append(call)
            continue
        turned = dict(sorted(arguments.items(), reverse=True))
        function = {**call["function"], "arguments": json.dumps(turned, indent=3)}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls} if calls else message


def everything(message: Message) -> Message:
    """All of it at once."""
    return in_parts(stripped(reordered(without_reasoning(message))))


HABITS: tuple[Habit, ...] = (dict, without_reasoning, in_parts, stripped, reordered, everything)


async def converse(talk: Talk, turns: int = 3, **options: Any) -> None:
    """Turns of a conversation that begins like no other; tools are called in the first."""
    talk.options = {"tools": TOOL_OPTIONS["tools"], "tool_choice": "none", **options}
    for turn in range(turns):
        calls = {**TOOL_OPTIONS} if turn == 0 else {}
        await talk.say("And then?" if turn else f"The weather in {uuid4().hex}, please.", **calls)


async def check_exact(talk: Talk) -> None:
    """Every follow-up turn extended the one before, by all evidence."""
    assert [turn.source for turn in talk.turns] == [
        "rendered: first_turn",
        *["extended"] * (len(talk.turns) - 1),
    ]
    assert await check_talk(talk) == 0


@pytest.mark.parametrize("ids", [False, True], ids=["plain", "ids"])
async def test_rewritten_messages_are_recognised(mortal_engine: EngineProcess, ids: bool) -> None:
    extra: dict[str, Any] = {"extra_body": {"return_token_ids": True}} if ids else {}
    for _ in range(4):  # until a turn happens to have both reasoning and words after it
        async with open_client(f"{mortal_engine.url}/v1") as client:
            talks = [Talk(client, number % 2 > 0, habit=habit) for number, habit in enumerate(HABITS)]
            await asyncio.gather(*(converse(talk, **THINKING, **extra) for talk in talks))
            for talk in talks:
                await check_exact(talk)
        spoken = [turn.message for talk in talks for turn in talk.turns[1:]]
        if any(message.get("reasoning") and message.get("content") for message in spoken):
            return
    pytest.fail("no turn had both reasoning and content")


async def test_a_retry_in_a_session_gets_the_first_answer_and_makes_no_fork(server: Served) -> None:
    for stream in (False, True):
        async with open_client(f"{server.url}/sessions/{uuid4().hex}/v1") as client:
            talk = Talk(client, stream)
            talk.options = {"extra_body": {"return_token_ids": True}}
            for text in (f"Say something about {uuid4().hex}.", "And then?", "Why?"):
                turn = await talk.say(text)
                reply = talk.messages.pop()
                [again] = await talk.ask(headers={"x-stainless-retry-count": "1"})
                assert again.headers["x-request-replayed"] == "true"
                assert (again.prompt_ids, again.ids) == (turn.prompt_ids, turn.ids)
                assert (again.message, again.headers["x-turn-id"]) == (
                    turn.message,
                    turn.headers["x-turn-id"],
                )
                talk.messages.append(reply)
            await check_exact(talk)


async def test_an_edited_turn_forks_there(server: Served) -> None:
    """What stands before the edit is kept exactly; the record says that and why."""
    async with open_client(f"{server.url}/v1") as client:
        talk = Talk(client, options={"extra_body": {"return_token_ids": True}})
        for text in (f"Say something about {uuid4().hex}.", "And then?", "Why?"):
            await talk.say(text)
        first, second, _ = talk.turns
        talk.messages[3]["content"] = "Something else altogether."
        edited = await talk.say("Really?")
        before = first.prompt_ids + first.ids
        assert edited.source == "extended: history_edited"
        assert edited.headers["x-prompt-reused"] == str(len(before))
        assert edited.prompt_ids[: len(before)] == before
        assert edited.prompt_ids[: len(second.prompt_ids + second.ids)] != second.prompt_ids + second.ids
        after = await talk.say("Go on.")
        assert after.source == "extended"
        kept = await record(talk)
    assert kept.of(edited)["parent"] == kept.of(first)["id"]
    assert kept.of(after)["parent"] == kept.of(edited)["id"]
    for turn in talk.turns:
        check_seen(kept, turn)
    check_samples(kept)
    assert len(kept.samples) == 2


async def test_a_killed_proxy_knows_its_conversations_when_it_is_back(
    engines: dict[str, EngineProcess], tmp_path: Path
) -> None:
    proxy = ProxyProcess(engines["stock"].url, "--store", f"sqlite:///{tmp_path / 'rollouts.db'}")
    try:
        proxy.start()
        async with open_client(f"{proxy.url}/v1") as client:
            talks = [Talk(client, stream) for stream in (False, True)]
            await asyncio.gather(*(talk.say(f"Talk about {uuid4().hex}.") for talk in talks))
            proxy.kill()
            proxy.start()
            await asyncio.gather(*(talk.say("And then?") for talk in talks))
            for talk in talks:
                await check_exact(talk)
    finally:
        proxy.stop()


async def test_two_proxies_with_one_redis(engines: dict[str, EngineProcess], redis_url: str) -> None:
    await _alternate(engines["stock"].url, redis_url)


async def test_two_proxies_with_one_redis_cluster(
    engines: dict[str, EngineProcess], cluster_url: str
) -> None:
    """The turns of a conversation without a session are found in whichever partition it is."""
    await _alternate(engines["stock"].url, cluster_url)


async def _alternate(engine: str, store: str) -> None:
    """The turns of every conversation go to one proxy and the other by turns."""
    with ExitStack() as stack:
        urls = [stack.enter_context(run_proxy(engine, "--store", store)) for _ in range(2)]
        async with AsyncExitStack() as clients:
            both = [await clients.enter_async_context(open_client(f"{url}/v1")) for url in urls]
            talks = [Talk(both[0], stream) for stream in (False, True)]
            talks.append(Talk(both[0], session=uuid4().hex))
            for turn in range(4):
                for talk in talks:
                    talk.client = both[turn % 2]
                    talk.options = {"extra_body": {"return_token_ids": True}}
                await asyncio.gather(
                    *(talk.say("And then?" if turn else f"Talk about {uuid4().hex}.") for talk in talks)
                )
            for talk in talks:
                await check_exact(talk)
