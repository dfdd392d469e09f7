"""Requests out of the ordinary: what was sampled is still recorded whole, and can still be continued."""

import asyncio
import json
from typing import Any, cast
from uuid import uuid4

import httpx
import pytest
from openai import AsyncStream
from openai.types.chat import ChatCompletionChunk

from proxy.demo.stack import EngineProcess
from tests.campaign.real_vllm.conftest import GENERATE, Served, every_spelling
from tests.campaign.real_vllm.rollouts import (
    MODEL,
    TOOL_OPTIONS,
    Talk,
    add,
    check_samples,
    check_seen,
    open_client,
    record,
)
from tests.campaign.real_vllm.test_disconnects import eventually
from tests.campaign.real_vllm.test_token_route import TOOLS, events

CHAT = "/v1/chat/completions"
ONE_CALL: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 60}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
UNUSUAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "ids": {"extra_body": {"return_token_ids": True}},
    "top_logprobs": {"logprobs": True, "top_logprobs": 3},
    "no_top_logprobs": {"logprobs": True, "top_logprobs": 0},
    "one_token": {"max_tokens": 1},
    "stop_string": {"stop": ["a", "e"], "max_tokens": 40},
    "stop_string_kept": {
        "stop": ["a", "e"],
        "max_tokens": 40,
        "extra_body": {"include_stop_str_in_output": True},
    },
    "call": ONE_CALL,
    "call_with_logprobs": {**ONE_CALL, "logprobs": True},
    "call_cut_short": {**ONE_CALL, "max_tokens": 12},
    "named_call": {**ONE_CALL, "tool_choice": NAMED},
    "two_choices_with_calls": {**ONE_CALL, "n": 2},
}
"""Options of the SDK."""


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    """Whether answers are streamed."""
    return bool(request.param)


@pytest.mark.parametrize("name", UNUSUAL)
async def test_unusual_requests_are_recorded_and_continued(server: Served, name: str) -> None:
    async with open_client(f"{server.url}/v1") as client:
        await asyncio.gather(
            *(check_continued(Talk(client, stream), UNUSUAL[name]) for stream in (False, True))
        )


async def test_hidden_reasoning_is_recorded_and_continued(server: Served, stream: bool) -> None:
    """vLLM sends no ids either where reasoning is not to be sent."""
    async with open_client(f"{server.url}/v1") as client:
        await check_continued(Talk(client, stream), {"extra_body": {"include_reasoning": False}})


@pytest.mark.parametrize("server", [GENERATE], indirect=True)
@pytest.mark.parametrize("name", ["plain", "call"])
async def test_the_same_by_the_generate_route(server: Served, stream: bool, name: str) -> None:
    """The second turn has the options too: the first is rendered, and so goes by the chat route."""
    async with open_client(f"{server.url}/v1") as client:
        await check_continued(Talk(client, stream), UNUSUAL[name], follow_up=UNUSUAL[name])


@pytest.mark.parametrize("server", [GENERATE], indirect=True)
async def test_stop_strings_are_answered_where_ids_cannot_be_given(server: Served, stream: bool) -> None:
    """The generate route has no exact way with them: the engine renders, and a reason is reported."""
    async with open_client(f"{server.url}/v1") as client:
        talk = Talk(client, stream)
        await talk.say(f"The weather in {uuid4().hex}, please.")
        turn = await talk.say("And tomorrow?", **UNUSUAL["stop_string"])
        assert turn.source == "rendered: special_request"
        after = await talk.say("And then?")
        assert after.source == "extended"


async def check_continued(
    talk: Talk, options: dict[str, Any], follow_up: dict[str, Any] | None = None
) -> None:
    """A turn with some options, and one after it; both are recorded with all their evidence."""
    tools = {"tools": options["tools"]} if "tools" in options else {}
    talk.options = tools
    talk.messages = [{"role": "user", "content": f"The weather in {uuid4().hex}, please."}]
    first = (await talk.ask(**options))[-1]
    talk.keep(first)
    kept = await record(talk)
    assert len(kept.turns) == options.get("n", 1)
    check_seen(kept, first)
    check_samples(kept)
    after = await talk.say("And tomorrow?", **(follow_up or ({"tool_choice": "none"} if tools else {})))
    assert after.source == "extended"
    kept = await record(talk)
    check_seen(kept, after)
    check_samples(kept)
    assert kept.of(after)["parent"] == kept.of(first)["id"]


@pytest.mark.parametrize("server", [GENERATE], indirect=True)
async def test_generate_keeps_the_limit_that_is_its_own_default(server: Served) -> None:
    """vLLM leaves `max_tokens: 16` out of what /render answers, and generate then knows no limit."""
    body = {
        "prompt_ids": [1, 4093, 198, 2683, 2, 198, 1, 520, 9531, 198],
        "max_tokens": 16,
        "ignore_eos": True,
        "stop_token_ids": [],
        "stream": True,
    }
    sampled = 0
    with server.http() as http, http.stream("POST", f"{CHAT}/tokens", json=body) as response:
        for chunk in events(response):
            sampled += sum(len(choice.get("token_ids") or []) for choice in chunk["choices"])
            assert sampled <= 16
    assert sampled == 16


@every_spelling
async def test_text_ends_before_the_stop_token(server: Served, stream: bool) -> None:
    """The template's mark of the end is in the ids, never in the text."""
    async with open_client(f"{server.url}/v1") as client:
        talk = Talk(client, stream)
        await talk.say(f"Say yes. {uuid4().hex}")
        # nothing but the stop token can be sampled
        turn = await talk.say("Stop.", extra_body={"allowed_token_ids": [2], "return_token_ids": True})
    assert (turn.source, turn.ids, turn.finish_reason) == ("extended", [2], "stop")
    assert turn.text == ""


async def test_both_choices_can_be_continued(server: Served, stream: bool) -> None:
    async with open_client(f"{server.url}/v1") as client:
        talk = Talk(client, stream, {"extra_body": {"return_token_ids": True}})
        talk.messages = [{"role": "user", "content": f"Say a number between {uuid4().hex} and 1."}]
        siblings = await talk.ask(n=2, logprobs=True)
        assert len({tuple(turn.ids) for turn in siblings}) == 2
        branches = []
        for sibling in siblings:
            branch = Talk(client, stream, talk.options, messages=list(talk.messages))
            branch.keep(sibling)
            branches.append((sibling, await branch.say("Are you sure?")))
        kept = await record(branch)
    assert len(kept.turns) == 4
    for sibling, after in branches:
        check_seen(kept, sibling)
        check_seen(kept, after)
        assert after.source == "extended"
        assert kept.of(after)["parent"] == kept.of(sibling)["id"]
        assert after.prompt_ids[: len(sibling.prompt_ids + sibling.ids)] == sibling.prompt_ids + sibling.ids
    check_samples(kept)
    assert len(kept.samples) == 2


@pytest.mark.alone  # counts the requests of an engine
@every_spelling
async def test_stream_that_its_client_leaves(server: Served) -> None:
    """The engine stops, what was sampled is recorded as an abort, and can be continued."""
    assert eventually(lambda: server.running() == 0)
    async with open_client(f"{server.url}/v1") as client:
        talk = Talk(client)
        await talk.say(f"Tell me a long story about {uuid4().hex}.")
        talk.messages.append({"role": "user", "content": "Longer!"})
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=talk.messages,  # type: ignore[arg-type]
            stream=True,
            max_tokens=3000,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        received: list[int] = []
        stream = cast(AsyncStream[ChatCompletionChunk], raw.parse())
        async for chunk in stream:
            for choice in cast(list[dict[str, Any]], chunk.to_dict()["choices"]):
                add(message, choice["delta"])
                received += choice.get("token_ids") or []
            if len(received) >= 8:
                break
        await stream.close()
        assert eventually(lambda: server.running() == 0)
        session = raw.headers["x-session-id"]
        aborted: list[dict[str, Any]] = []

        def recorded() -> bool:
            turns = httpx.get(f"{server.url}/v1/sessions/{session}?ids=true").json()["turns"]
            aborted[:] = [turn for turn in turns if turn["request"] == raw.headers["x-turn-id"]]
            return bool(aborted)

        assert eventually(recorded)
        [turn] = aborted
        assert (turn["finish_reason"], turn["problem"]) == ("abort", None)
        assert turn["completion_ids"][: len(received)] == received
        assert len(turn["logprobs"]) == len(turn["completion_ids"]) < 100
        assert turn["message"]["content"].startswith(message["content"])
        talk.messages.append(message)
        after = await talk.say("Go on.")
        kept = await record(talk)
        # what was on its way when the client left is recorded, and the client's text is then another
        all_of_it = turn["message"]["content"] == message["content"]
        assert after.source == ("extended" if all_of_it else "extended: history_edited")
        assert kept.of(after)["parent"] == (turn["id"] if all_of_it else turn["parent"])
        check_samples(kept)


@every_spelling
async def test_required_prefix(server: Served, stream: bool) -> None:
    """NeMo-RL's contract: the prompt is the given ids, then the template's rendering of what is new."""
    async with open_client(f"{server.url}/v1") as client:
        talk = Talk(client, stream, {"extra_body": {"return_token_ids": True}})
        first = await talk.say(f"What is {uuid4().hex}?", **TOOL_OPTIONS)
        talk.options["tools"] = TOOL_OPTIONS["tools"]
        given = first.prompt_ids + first.ids
        extra = {"return_token_ids": True, "required_prefix_token_ids": given}
        turn = await talk.say("And so?", tool_choice="none", extra_body=extra)
    assert turn.source == "given: prefix_given"
    assert turn.headers["x-prompt-reused"] == str(len(given))
    assert turn.prompt_ids[: len(given)] == given
    assert len(turn.prompt_ids) == len(given) + int(turn.headers["x-prompt-appended"])


def keys(value: object, path: str = "") -> set[str]:
    """All keys of a JSON value with where they stand, and which of them are null."""
    if isinstance(value, dict):
        named = {f"{path}.{key}" + (" is null" if one is None else "") for key, one in value.items()}
        return named.union(*(keys(one, f"{path}.{key}") for key, one in value.items()))
    if isinstance(value, list):
        return set().union(*(keys(one, f"{path}[]") for one in value))
    return set()


def different_keys(server: Served, stock_url: str, stream: bool, name: str) -> set[str]:
    """What an extended turn's answer and a stock engine's do not both have."""
    options = dict(UNUSUAL[name])
    history = [
        {"role": "user", "content": f"Hello, {uuid4().hex}"},
        {"role": "user", "content": "What about the weather?"},
    ]
    body = {"model": MODEL, "max_tokens": 6, "seed": 3, **options.pop("extra_body", {}), **options}
    with server.http() as http:
        tools = {"tools": body["tools"], "tool_choice": "none"} if "tools" in body else {}
        first = http.post(CHAT, json={"model": MODEL, "messages": history[:1], "max_tokens": 4, **tools})
        history.insert(1, first.json()["choices"][0]["message"])
        body["messages"] = history
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": name != "plain"}}
        ours = http.post(CHAT, json=body)
    stock = httpx.post(stock_url + CHAT, json=body, timeout=120)
    assert ours.headers["x-prompt-source"] == "extended"
    assert not stock.headers.keys() - ours.headers.keys()
    if stream:
        chunks = [
            [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            for answer in (ours, stock)
        ]
        return keys(chunks[0]) ^ keys(chunks[1])
    return keys(ours.json()) ^ keys(stock.json())


@pytest.mark.parametrize("name", ["plain", "ids", "top_logprobs", "call"])
def test_answers_have_the_keys_of_a_stock_engine(
    server: Served, engines: dict[str, EngineProcess], stream: bool, name: str
) -> None:
    """Extended turns too: no client can tell by the body how its prompt was made.

    A stream without usage lacks vLLM's fingerprint: the engine sends it only with usage.
    """
    missing = {"[].system_fingerprint"} if stream else set()
    assert different_keys(server, engines["stock"].url, stream, name) <= missing


@pytest.mark.parametrize("server", [GENERATE], indirect=True)
@pytest.mark.parametrize("name", ["plain", "ids", "top_logprobs", "call"])
def test_answers_of_the_generate_route_have_nearly_those_keys(
    server: Served, engines: dict[str, EngineProcess], stream: bool, name: str
) -> None:
    """It knows no fingerprint, one detail of usage less, and what weights were used; it streams no nulls."""
    different = different_keys(server, engines["stock"].url, stream, name)
    own = ("system_fingerprint", "created_cache_tokens", "weight_versions", "delta.content is null")
    assert {key for key in different if not any(name in key for name in own)} == set()
