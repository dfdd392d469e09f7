"""An agent framework of others, the OpenAI Agents SDK: it gets a base URL and nothing else."""

import asyncio
import json
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Literal
from uuid import uuid4

import httpx2
import pytest
from agents import (
    Agent,
    FunctionToolResult,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    RunContextWrapper,
    Runner,
    ToolsToFinalOutputResult,
    TResponseInputItem,
    function_tool,
)
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from pydantic import Field

from proxy.demo.stack import EngineProcess
from tests.campaign.real_vllm.conftest import Served, only_inside
from tests.campaign.real_vllm.wire import json_events

TOOL_ROUNDS = 2


@dataclass(frozen=True)
class Talk:
    """A conversation: for each question `TOOL_ROUNDS` turns that must call tools, then one in words."""

    name: str
    questions: tuple[str, str]
    session: bool
    stream: bool
    ids: bool
    """Whether to ask for ids; they are compared then."""


TALKS = (
    Talk(
        "weather",
        ("Is it warmer in Paris or in Rome?", "And how is the weather in Reykjavík?"),
        session=True,
        stream=False,
        ids=False,
    ),
    Talk(
        "sums",
        ("How much is 18 * 7, and then 126 - 30?", "Take it 3 times."),
        session=True,
        stream=True,
        ids=True,
    ),
    Talk(
        "both",
        ("Add up the temperatures of Oslo and Bergen.", "Now the difference to Helsinki, please."),
        session=False,
        stream=False,
        ids=True,
    ),
    Talk(
        "journey",
        ("I go to Lisbon for 12 days. What shall I wear?", "And if I stay 3 more?"),
        session=False,
        stream=True,
        ids=False,
    ),
)


@function_tool
def get_weather(city: Annotated[str, Field(max_length=24)], unit: Literal["celsius", "fahrenheit"]) -> str:
    """Current weather in a city"""
    return json.dumps({"city": city, "unit": unit, "temperature": 18, "sky": "light rain"})


@function_tool
def calculator(
    a: Annotated[int, Field(ge=0, le=999)],
    operator: Literal["+", "-", "*"],
    b: Annotated[int, Field(ge=0, le=999)],
) -> str:
    """Adds, subtracts or multiplies two numbers"""
    return str({"+": a + b, "-": a - b, "*": a * b}[operator])


@dataclass
class Seen:
    """What came back over the wire, in order; the framework gets all of it unchanged."""

    headers: list[httpx2.Headers] = field(default_factory=list)
    ids: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Prompt and completion of each turn, if the request asks for them."""

    async def __call__(self, response: httpx2.Response) -> None:
        """An event hook of the HTTP client."""
        body = await response.aread()
        assert response.status_code == 200, body
        self.headers.append(response.headers)
        events = list(json_events(body))
        sampled = [
            token
            for event in events
            for choice in event["choices"]
            for token in choice.get("token_ids") or []
        ]
        if events[0].get("prompt_token_ids"):
            self.ids.append((events[0]["prompt_token_ids"], sampled))

    def drifted(self) -> int:
        """Follow-up turns whose prompt does not begin with all ids of the turn before."""
        return sum(
            after[: len(prompt) + len(sampled)] != prompt + sampled
            for (prompt, sampled), (after, _) in pairwise(self.ids)
        )


@dataclass
class Rounds:
    """How often the tools were used in one run."""

    done: int = 0


def enough_rounds(
    context: RunContextWrapper[Rounds], results: list[FunctionToolResult]
) -> ToolsToFinalOutputResult:
    """End a run whose model must always call a tool."""
    context.context.done += 1
    return ToolsToFinalOutputResult(context.context.done == TOOL_ROUNDS, "enough")


async def converse(url: str, talk: Talk) -> Seen:
    """Hold a conversation as an application of the framework does, and watch it from the HTTP client."""
    seen = Seen()
    base_url = f"{url}/sessions/{talk.name}-{uuid4().hex}/v1" if talk.session else f"{url}/v1"
    http = DefaultAsyncHttpxClient(event_hooks={"response": [seen]}, timeout=240)
    async with AsyncOpenAI(base_url=base_url, api_key="none", http_client=http, max_retries=0) as client:
        settings = ModelSettings(
            temperature=1.2,
            max_tokens=128,
            tool_choice="required",
            # The framework leaves turns without text or calls out of the history.
            extra_body={"min_tokens": 4} | ({"return_token_ids": True} if talk.ids else {}),
        )
        caller = Agent[Rounds](
            name="caller",
            instructions="Use the tools. Be brief.",
            model=OpenAIChatCompletionsModel("smollm2", client),
            model_settings=settings,
            tools=[get_weather, calculator],
            tool_use_behavior=enough_rounds,
            reset_tool_choice=False,
        )
        speaker = caller.clone(model_settings=settings.resolve(ModelSettings(tool_choice="none")))
        items: list[TResponseInputItem] = []
        for question in talk.questions:
            items.append({"role": "user", "content": question})
            items = await _run(caller, items, talk.stream)
            if items[-1].get("role") == "assistant":
                # A call was cut short, and became text.
                items.append({"role": "user", "content": "Please go on."})
            items = await _run(speaker, items, talk.stream)
    return seen


async def _run(
    agent: Agent[Rounds], items: list[TResponseInputItem], stream: bool
) -> list[TResponseInputItem]:
    config = RunConfig(tracing_disabled=True)
    if not stream:
        return (await Runner.run(agent, items, context=Rounds(), run_config=config)).to_input_list()
    streamed = Runner.run_streamed(agent, items, context=Rounds(), run_config=config)
    async for _ in streamed.stream_events():
        pass
    return streamed.to_input_list()


@only_inside
async def test_no_turn_drifts(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    talks = await asyncio.gather(*(converse(server.url, talk) for talk in TALKS))
    for talk, seen in zip(TALKS, talks, strict=True):
        sources = [(headers["x-prompt-source"], headers.get("x-prompt-reason")) for headers in seen.headers]
        assert sources == [("rendered", "first_turn"), *[("extended", None)] * (len(sources) - 1)], talk.name
        assert len(seen.ids) == (len(sources) if talk.ids else 0)
        assert seen.drifted() == 0
    calls = sum(_check_tree(server, seen) for seen in talks)
    assert calls >= len(TALKS), "the model must have used tools"
    follow_ups = sum(len(seen.headers) - 1 for seen in talks)
    assert follow_ups >= 3 * len(TALKS)
    with capsys.disabled():
        print(f"\n  tokenproxy: 0 of {follow_ups} follow-up turns drifted")


def _check_tree(server: Served, seen: Seen) -> int:
    """The session's record is one chain, in which every prompt extends the turn before by what it says.

    Returns:
        Number of turns that call tools: the others were cut off before their call was complete.
    """
    [rollout] = {headers["x-session-id"] for headers in seen.headers}
    with server.http() as http:
        answer = http.get(f"/v1/sessions/{rollout}")
    assert answer.status_code == 200, answer.text
    turns = answer.json()["turns"]
    assert len(turns) == len(seen.headers)
    assert (turns[0]["parent"], turns[0]["source"]) == (None, "rendered")
    for before, turn in pairwise(turns):
        assert turn["parent"] == before["id"]
        assert (turn["source"], turn["reason"]) == ("extended", None)
        assert turn["reused"] == before["prompt_tokens"] + before["completion_tokens"]
        assert turn["prompt_tokens"] == turn["reused"] + turn["appended"]
    return sum(bool(turn["message"].get("tool_calls")) for turn in turns)


@pytest.mark.broad
async def test_the_same_loop_on_a_stock_vllm(
    engines: dict[str, EngineProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    """How far it drifts is printed, not judged; only the measurement itself is checked."""
    stock = engines["stock"].url
    plain = [replace(talk, session=False, ids=True) for talk in TALKS]
    talks = await asyncio.gather(*(converse(stock, talk) for talk in plain))
    assert all(len(seen.ids) == len(seen.headers) for seen in talks)
    follow_ups = sum(len(seen.ids) - 1 for seen in talks)
    assert follow_ups >= 3 * len(TALKS)
    with capsys.disabled():
        drifted = sum(seen.drifted() for seen in talks)
        print(f"\n  stock vLLM: {drifted} of {follow_ups} follow-up turns drifted")
