"""The OpenAI Agents SDK: it gets a base URL and nothing else."""

from dataclasses import dataclass
from typing import Annotated, Literal

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
from pydantic import Field

from tests.campaign.real_vllm.clients.table import MODEL, Target

_TOOL_ROUNDS = 2


@function_tool
def get_weather(city: Annotated[str, Field(max_length=24)], unit: Literal["celsius", "fahrenheit"]) -> str:
    """Current weather in a city"""
    return f"{city}: 18 degrees {unit}"


@dataclass
class Rounds:
    """How often the tools were used in one run."""

    done: int = 0


def enough_rounds(
    context: RunContextWrapper[Rounds], results: list[FunctionToolResult]
) -> ToolsToFinalOutputResult:
    """End a run whose model must always call a tool."""
    context.context.done += 1
    return ToolsToFinalOutputResult(context.context.done == _TOOL_ROUNDS, "enough")


async def hold(target: Target, *, stream: bool) -> None:
    """For each question two turns that must call tools, then one in words."""
    async with target.sdk() as client:
        settings = ModelSettings(
            temperature=1.2,
            max_tokens=128,
            tool_choice="required",
            # The framework leaves turns without text or calls out of the history.
            extra_body={"min_tokens": 4, "return_token_ids": True},
        )
        caller = Agent[Rounds](
            name="caller",
            instructions="Use the tools. Be brief.",
            model=OpenAIChatCompletionsModel(MODEL, client),
            model_settings=settings,
            tools=[get_weather],
            tool_use_behavior=enough_rounds,
            reset_tool_choice=False,
        )
        speaker = caller.clone(model_settings=settings.resolve(ModelSettings(tool_choice="none")))
        items: list[TResponseInputItem] = []
        for question in ("Is it warmer in Paris or in Rome?", "And how is the weather in Reykjavík?"):
            items.append({"role": "user", "content": question})
            items = await _run(caller, items, stream)
            if items[-1].get("role") == "assistant":
                # A call was cut short, and became text.
                items.append({"role": "user", "content": "Please go on."})
            items = await _run(speaker, items, stream)


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
