"""Agent frameworks that send a turn back in a form of their own, with the Python of their own environment.

python -P echoing.py NAME BASE_URL CALL WORDS

The base URL names a session. CALL and WORDS are its overrides, as JSON, with which the model samples a text
with a call and one without. `-P`: modules in this folder have the names of frameworks.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx

_QUESTIONS = ("Is it warmer in Paris or in Rome?", "And in Oslo?")
_CALLS = 3
"""Turns with a call for each question; one in words ends it."""


class Model:
    """A model at a base URL, whose session is told what it samples next."""

    def __init__(self, url: str, call: str, words: str) -> None:
        self.url = url
        self._root, self._session = url.removesuffix("/v1").split("/sessions/")
        self._call, self._words = json.loads(call), json.loads(words)
        self._calls = count(1)

    def _sample(self, overrides: dict[str, Any]) -> None:
        body = {"id": self._session, "overrides": overrides}
        httpx.post(f"{self._root}/v1/sessions", json=body).raise_for_status()

    def weather(self, city: str, number: int = 0) -> str:
        """Weather of a city.

        Args:
            city: the city
            number: a number
        """
        self._sample(self._call if next(self._calls) % _CALLS else self._words)
        return f"18 degrees in {city}"

    def questions(self) -> Iterator[str]:
        """What the user asks; each answer begins with calls."""
        for question in _QUESTIONS:
            self._sample(self._call)
            yield question


def langchain(model: Model) -> None:
    """LangChain's agent, with a name."""
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=model.url, api_key="none", model="smollm2", max_retries=0)
    agent = create_agent(chat, [model.weather], name="forecaster", system_prompt="Be brief.")
    messages: list[Any] = []
    for question in model.questions():
        messages = agent.invoke({"messages": [*messages, ("user", question)]})["messages"]


async def semantic_kernel(model: Model) -> None:
    """An agent of semantic-kernel, which puts its name into its messages and drops text next to calls."""
    from openai import AsyncOpenAI
    from semantic_kernel.agents import ChatCompletionAgent
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
    from semantic_kernel.functions import kernel_function

    class Weather:
        @kernel_function(description="Weather of a city.")
        def weather(self, city: str, number: int = 0) -> str:
            return model.weather(city, number)

    client = AsyncOpenAI(base_url=model.url, api_key="none", max_retries=0)
    agent = ChatCompletionAgent(
        service=OpenAIChatCompletion("smollm2", async_client=client),
        name="forecaster",
        instructions="Be brief.",
        plugins=[Weather()],
    )
    thread = None
    for question in model.questions():
        thread = (await agent.get_response(question, thread=thread)).thread


async def agent_framework(model: Model) -> None:
    """An agent of Microsoft's Agent Framework, which names it even if it has no name."""
    from agent_framework import Agent
    from agent_framework.openai import OpenAIChatCompletionClient

    client = OpenAIChatCompletionClient("smollm2", api_key="none", base_url=model.url)
    agent = Agent(client, "Be brief.", tools=[model.weather])
    session = agent.create_session()
    for question in model.questions():
        await agent.run(question, session=session)


async def ag2(model: Model) -> None:
    """An agent of AG2."""
    from ag2 import Agent
    from ag2.config.openai import OpenAIConfig

    config = OpenAIConfig(model="smollm2", api_key="none", base_url=model.url, max_retries=0)
    agent: Any = Agent("forecaster", "Be brief.", config=config, tools=[model.weather])
    for question in model.questions():
        agent = await agent.ask(question)


def crewai(model: Model) -> None:
    """A crew of CrewAI, which drops text next to calls."""
    from crewai import LLM, Agent, Crew, Task
    from crewai.tools import tool

    llm = LLM(model="openai/smollm2", base_url=model.url, api_key="none")
    weather = tool("weather")(model.weather)
    agent = Agent(role="forecaster", goal="Be brief.", backstory="None.", llm=llm, tools=[weather])
    task = Task(description=next(model.questions()), expected_output="a word", agent=agent)
    Crew(agents=[agent], tasks=[task]).kickoff()


def agno(model: Model) -> None:
    """An agent of agno, which renames calls."""
    from agno.agent import Agent
    from agno.db.in_memory import InMemoryDb
    from agno.models.openai import OpenAIChat

    chat = OpenAIChat("smollm2", base_url=model.url, api_key="none", max_retries=0)
    agent = Agent(model=chat, tools=[model.weather], db=InMemoryDb(), add_history_to_context=True)
    for question in model.questions():
        agent.run(question, session_id="s")


_PROGRAMS: dict[str, Any] = {
    "LangChain": langchain,
    "semantic-kernel": semantic_kernel,
    "Agent Framework": agent_framework,
    "AG2": ag2,
    "CrewAI": crewai,
    "agno": agno,
}

if __name__ == "__main__":
    os.environ |= {"OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false", "AGNO_TELEMETRY": "false"}
    running = _PROGRAMS[sys.argv[1]](Model(*sys.argv[2:]))
    if running is not None:
        asyncio.run(running)
    print("{}")
