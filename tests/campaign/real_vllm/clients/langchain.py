"""LangChain and LangGraph as they come, given a base URL."""

import json
import warnings
from itertools import cycle
from typing import Annotated, Any, Literal

from langchain_core.messages import AIMessageChunk, AnyMessage, HumanMessage
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool, tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from langgraph.prebuilt.chat_agent_executor import AgentState
from langgraph.runtime import Runtime
from langgraph.warnings import LangGraphDeprecatedSinceV10
from pydantic import Field

from tests.campaign.real_vllm.clients.target import MODEL, Target

_ROUNDS = 2
"""Turns that must call tools, for each question."""
_QUESTIONS = ("Is it warmer in Paris or in Rome?", "And how is the weather in Reykjavík?", "And in Oslo?")
_CUTS = (21, 34, 27, 52, 24, 39)
"""In tokens: most within the arguments of a call, which ends after 40 to 50, spelled letter by letter."""


@tool
def get_weather(city: Annotated[str, Field(max_length=16)], unit: Literal["celsius", "fahrenheit"]) -> str:
    """Current weather in a city"""
    return json.dumps({"city": city, "unit": unit, "temperature": 18, "sky": "light rain"})


_WEATHER: BaseTool = get_weather
# Arguments that a cut call lacks are an answer of the tool, not the end of the program.
_WEATHER.handle_validation_error = True


def _model(target: Target) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{target.root}/v1",
        api_key="none",
        model=MODEL,
        temperature=1.2,
        stream_usage=True,
        max_retries=0,
        http_async_client=target.sdk()._client,
        extra_body={"return_token_ids": True},
    )


def _calling(model: ChatOpenAI, choice: str, limit: int) -> Runnable[Any, Any]:
    return model.bind_tools([_WEATHER], tool_choice=choice, strict=True, max_tokens=limit)


async def hold_cut(target: Target) -> None:
    """The usual loop over streams whose calls are often cut: LangChain completes their JSON."""
    model, messages, cuts = _model(target), list[AnyMessage](), cycle(_CUTS)
    for question in _QUESTIONS:
        messages.append(HumanMessage(question))
        for _ in range(_ROUNDS):
            whole: AIMessageChunk | None = None
            async for chunk in _calling(model, "required", next(cuts)).astream(messages):
                whole = chunk if whole is None else whole + chunk
            assert whole is not None
            results = [await _WEATHER.ainvoke(call) for call in whole.tool_calls]
            messages += [whole, *(results or [HumanMessage("Please go on.")])]


async def hold_react(target: Target, name: str | None = None) -> None:
    """LangGraph's own agent, which runs the tools. With a name, it puts that into all of its messages."""
    bound = _model(target)

    def model(state: AgentState, runtime: Runtime[None]) -> Runnable[Any, Any]:
        last = max(n for n, message in enumerate(state["messages"]) if message.type == "human")
        rounds = sum(message.type == "ai" for message in state["messages"][last:])
        return _calling(bound, "required", 96) if rounds < _ROUNDS else _calling(bound, "none", 24)

    with warnings.catch_warnings():
        # It moved to the package langchain, which is not needed for anything else.
        warnings.simplefilter("ignore", LangGraphDeprecatedSinceV10)
        agent = create_react_agent(model, [_WEATHER], name=name)
    messages: list[AnyMessage] = []
    for question in _QUESTIONS[:2]:
        messages = (await agent.ainvoke({"messages": [*messages, HumanMessage(question)]}))["messages"]
