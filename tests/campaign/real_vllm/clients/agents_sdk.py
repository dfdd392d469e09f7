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

from tests.campaign.real_vllm.clients.target import MODEL, Target

_TOOL_ROUNDS = 2
_QUIET = RunConfig(tracing_disabled=True)


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


async def hold(target: Target) -> None:
    """For each question two streamed turns that must call tools, then one in words as a whole."""
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
            items = await _streamed(caller, items)
            if items[-1].get("role") == "assistant":
                # A call was cut short, and became text.
                items.append({"role": "user", "content": "Please go on."})
            result = await Runner.run(speaker, items, context=Rounds(), run_config=_QUIET)
            items = result.to_input_list()


async def _streamed(agent: Agent[Rounds], items: list[TResponseInputItem]) -> list[TResponseInputItem]:
    streamed = Runner.run_streamed(agent, items, context=Rounds(), run_config=_QUIET)
    async for _ in streamed.stream_events():
        pass
    return streamed.to_input_list()
