"""LangChain and LangGraph as they come, given a base URL: no id may drift, also where a call was cut.

All conversations of this file are held at once, with both ways to run and with a stock vLLM, which takes
little longer than one of them alone; the tests then look at what came of them.
"""

import asyncio
import json
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage, HumanMessage, ToolMessage
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool, tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from langgraph.prebuilt.chat_agent_executor import AgentState
from langgraph.runtime import Runtime
from langgraph.warnings import LangGraphDeprecatedSinceV10
from pydantic import Field

from proxy.demo.stack import EngineProcess
from tests.campaign.real_vllm.conftest import FRONT, INSIDE
from tests.campaign.real_vllm.rollouts import Record, drifted
from tests.campaign.real_vllm.wire import Wire, check_chain

pytestmark = [pytest.mark.timeout(900), pytest.mark.broad]

STOCK = "stock vLLM"
TOOL_ROUNDS = 2
"""Turns that must call tools, for each question, before one in words."""


@tool
def get_weather(city: Annotated[str, Field(max_length=16)], unit: Literal["celsius", "fahrenheit"]) -> str:
    """Current weather in a city"""
    return json.dumps({"city": city, "unit": unit, "temperature": 18, "sky": "light rain"})


@tool
def calculator(
    a: Annotated[int, Field(ge=0, le=999)],
    operator: Literal["+", "-", "*"],
    b: Annotated[int, Field(ge=0, le=999)],
) -> str:
    """Adds, subtracts or multiplies two numbers"""
    return str({"+": a + b, "-": a - b, "*": a * b}[operator])


TOOLS: dict[str, BaseTool] = {one.name: one for one in (get_weather, calculator)}
for one in TOOLS.values():
    # Arguments that a cut call lacks are an answer of the tool, not the end of the program.
    one.handle_validation_error = True


@dataclass
class Application:
    """What an application is made of."""

    model: ChatOpenAI
    questions: tuple[str, ...]
    cuts: tuple[int, ...] = ()
    """Of each turn in turn, how many tokens it may have."""
    turns: int = 0
    """How many were requested."""

    def calling(self, choice: str) -> Runnable[Any, AIMessage]:
        """The model with its tools, for one turn."""
        limit = 96 if choice == "required" else 24
        if self.cuts:
            limit = self.cuts[self.turns % len(self.cuts)]
        self.turns += 1
        return self.model.bind_tools(list(TOOLS.values()), tool_choice=choice, strict=True, max_tokens=limit)


async def answers(message: AIMessage) -> list[ToolMessage]:
    """What the tools say to the calls of a message."""
    return [await TOOLS[call["name"]].ainvoke(call) for call in message.tool_calls]


async def invoke(model: Runnable[Any, AIMessage], messages: list[AnyMessage]) -> AIMessage:
    """One turn whose answer comes whole."""
    return await model.ainvoke(messages)


async def stream(model: Runnable[Any, AIMessage], messages: list[AnyMessage]) -> AIMessage:
    """One turn whose answer comes in chunks, which LangChain adds up."""
    whole: AIMessageChunk | None = None
    async for chunk in model.astream(messages):
        assert isinstance(chunk, AIMessageChunk)
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return whole


Ask = Callable[[Runnable[Any, AIMessage], list[AnyMessage]], Awaitable[AIMessage]]
Program = Callable[[Application], Awaitable[None]]


def loop(ask: Ask, *, words: bool) -> Program:
    """The usual loop: for each question turns that call tools and get answers, then perhaps one in words."""

    async def program(app: Application) -> None:
        messages: list[AnyMessage] = []
        for question in app.questions:
            messages.append(HumanMessage(question))
            for _ in range(TOOL_ROUNDS):
                message = await ask(app.calling("required"), messages)
                messages += [message, *await answers(message)]
                if message is messages[-1]:
                    messages.append(HumanMessage("Please go on."))
            if words:
                messages.append(await ask(app.calling("none"), messages))

    return program


async def react(app: Application) -> None:
    """LangGraph's own agent, which runs the tools."""

    def model(state: AgentState, runtime: Runtime[None]) -> Runnable[Any, AIMessage]:
        last = max(n for n, message in enumerate(state["messages"]) if message.type == "human")
        rounds = sum(message.type == "ai" for message in state["messages"][last:])
        return app.calling("required" if rounds < TOOL_ROUNDS else "none")

    with warnings.catch_warnings():
        # It moved to the package langchain, which is not needed for anything else.
        warnings.simplefilter("ignore", LangGraphDeprecatedSinceV10)
        agent = create_react_agent(model, list(TOOLS.values()))
    messages: list[AnyMessage] = []
    for question in app.questions:
        messages = (await agent.ainvoke({"messages": [*messages, HumanMessage(question)]}))["messages"]


WEATHER = ("Is it warmer in Paris or in Rome?", "And how is the weather in Reykjavík?")
SUMS = ("How much is 18 * 7, and then 126 - 30?", "Take it 3 times.")
JOURNEY = (*WEATHER, "I go to Lisbon for 12 days. What shall I wear?")
COUNTS = (*SUMS, "What is left of 412 after that?")
CUTS = (21, 34, 27, 52, 24, 39, 30, 45)
"""In tokens: most within the arguments of a call, which ends after 40 to 50, spelled letter by letter."""

CASES: dict[str, tuple[Program, tuple[dict[str, Any], ...]]] = {
    "react agent": (react, ({"questions": WEATHER}, {"questions": SUMS})),
    "stream": (loop(stream, words=True), ({"questions": WEATHER}, {"questions": SUMS})),
    "required": (loop(invoke, words=False), ({"questions": WEATHER}, {"questions": SUMS})),
    "cut": (
        loop(stream, words=False),
        ({"questions": JOURNEY, "cuts": CUTS}, {"questions": COUNTS, "cuts": CUTS[4:]}),
    ),
}
"""Each with its conversations. In the first of them the client asks for no ids, as most clients do."""
WHICH = {INSIDE: (0,), FRONT: (1,), STOCK: (1,)}
"""Of the conversations of each case."""


@dataclass
class Held:
    """A conversation that was held."""

    wire: Wire = field(default_factory=Wire, repr=False)
    error: Exception | None = None
    record: Record | None = field(default=None, repr=False)

    async def hold(self, url: str, program: Program, number: int, **options: Any) -> None:
        """Hold it to its end, or to the first error."""
        async with self.wire.open_client() as http:
            model = ChatOpenAI(
                base_url=f"{url}/v1",
                api_key="none",
                model="smollm2",
                temperature=1.2,
                seed=number,
                stream_usage=True,
                max_retries=0,
                http_async_client=http,
                extra_body={"return_token_ids": True} if number else None,
            )
            try:
                await program(Application(model, **options))
            except Exception as error:  # noqa: BLE001 the test of this conversation raises it
                self.error = error


Everything = dict[tuple[str, str], list[Held]]


@pytest.fixture(scope="module")
def everything(engines: dict[str, EngineProcess], proxies: dict[str, str]) -> Everything:
    """All conversations, by server and case."""
    urls = {INSIDE: engines["plugin"].url, FRONT: proxies[FRONT], STOCK: engines["stock"].url}
    everything: Everything = {}
    running: list[Awaitable[None]] = []
    for server, url in urls.items():
        for case, (program, conversations) in CASES.items():
            everything[server, case] = []
            for number in WHICH[server]:
                everything[server, case].append(held := Held())
                running.append(held.hold(url, program, number, **conversations[number]))

    async def all_at_once() -> None:
        await asyncio.gather(*running)
        for (server, _), several in everything.items():
            for held in several:
                if server != STOCK and held.wire.turns:
                    held.record = await held.wire.record(urls[server])

    # With a factory the runner leaves the event loop of the other tests alone.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(all_at_once())
    return everything


def follow_ups(several: list[Held]) -> int:
    """How many turns could drift."""
    return sum(len(held.wire.turns) - 1 for held in several)


def count(several: list[Held]) -> int:
    """How many turns did."""
    return sum(drifted(held.wire.ids(held.record)) for held in several)


def test_how_far_everything_drifts(everything: Everything, capsys: pytest.CaptureFixture[str]) -> None:
    """With a stock vLLM this measurement finds drift, so that finding none of it elsewhere says something."""
    with capsys.disabled():
        print(f"\n  LangChain: follow-up turns that drifted  {INSIDE:>16}  {FRONT:>16}  {STOCK:>16}")
        for case in CASES:
            cells = [everything[server, case] for server in (INSIDE, FRONT, STOCK)]
            counts = [f"{count(several)} of {follow_ups(several)}" for several in cells]
            print(f"    {case:<36}  {counts[0]:>16}  {counts[1]:>16}  {counts[2]:>16}")
    for case in CASES:
        for held in everything[STOCK, case]:
            assert held.error is None, held.error
    assert sum(count(everything[STOCK, case]) for case in CASES) > 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [INSIDE, FRONT])
def test_no_turn_drifts(everything: Everything, name: str, case: str) -> None:
    for held in everything[name, case]:
        if held.error is not None:
            raise held.error
        wire, record = held.wire, held.record
        assert record is not None
        drift = drifted(wire.ids(record))
        assert drift == 0, wire.sources()
        _check_sources(wire)
        check_chain(record, wire.turns)
        _check_calls(wire, case)
    assert follow_ups(everything[name, case]) >= TOOL_ROUNDS + 1


def _check_sources(wire: Wire) -> None:
    """A call that LangChain repaired is reported; no other turn has a reason."""
    assert wire.turns[0].source == "rendered: first_turn"
    repaired_before = False
    for turn, repaired in zip(wire.turns[1:], wire.repaired()[1:], strict=True):
        repaired_before |= repaired
        expected = {"extended: call_repaired"} if repaired else {"extended"}
        if repaired_before:  # of the message that it brings back again, a later turn may report it or not
            expected.add("extended: call_repaired")
        assert turn.source in expected, wire.sources()


def _check_calls(wire: Wire, case: str) -> None:
    """The model called tools where it had to, and where it was to be cut LangChain did complete its JSON."""
    turns = list(zip(wire.turns, wire.requests, strict=True))
    required = [turn for turn, request in turns if request["tool_choice"] == "required"]
    calls = [turn for turn in required if turn.message.get("tool_calls")]
    assert len(calls) >= 2
    assert all(turn in calls for turn in required if turn.finish_reason != "length")
    if case == "cut":
        assert any(turn.finish_reason == "length" for turn in calls)
        assert any(wire.repaired()), "no call was cut within its arguments"
