"""Agent frameworks, unmodified, with the Python of their own environment: each holds one conversation.

python frameworks.py NAME BASE_URL      the session in the base URL sets how turns are sampled
"""

import os
import sys
from contextlib import suppress
from tempfile import mkdtemp
from typing import Any, Literal

TURNS = 4
_TASK = "Is it warmer in Paris or in Rome?"


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather of a city.

    Args:
        city: the city
    """
    return f"18 degrees in {city}"


def smolagents(url: str, kind: str) -> None:
    """A `CodeAgent` or a `ToolCallingAgent`; the other tool is left out: with it a run ends by chance."""
    import smolagents

    def stop(step: Any, agent: Any) -> None:
        if step.step_number == TURNS:
            agent.interrupt()

    model = smolagents.OpenAIModel("smollm2", api_base=url, api_key="none")
    get_weather = smolagents.tool(weather)
    get_weather.inputs["city"]["enum"] = ["Paris", "Rome"]
    kinds = {"CodeAgent": smolagents.CodeAgent, "ToolCallingAgent": smolagents.ToolCallingAgent}
    agent = kinds[kind]([get_weather], model, step_callbacks=[stop], max_steps=9, verbosity_level=0)
    del agent.tools["final_answer"]
    with suppress(smolagents.AgentError):
        agent.run(_TASK)


def pydantic_ai(url: str) -> None:
    """Its agent loop."""
    from pydantic_ai import Agent, UsageLimitExceeded, UsageLimits
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("smollm2", provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = Agent(model, system_prompt="Be brief.", tools=[weather])
    with suppress(UsageLimitExceeded):
        agent.run_sync(_TASK, usage_limits=UsageLimits(request_limit=TURNS))


def inspect_ai(url: str) -> None:
    """A task whose solver calls tools in a loop."""
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import get_model
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    @tool
    def get_weather() -> Any:
        async def execute(city: Literal["Paris", "Rome"]) -> str:
            """Weather of a city.

            Args:
                city: the city
            """
            return weather(city)

        return execute

    model = get_model("openai-api/proxy/smollm2", base_url=url, api_key="none")
    task = Task([Sample(_TASK)], solver=[use_tools(get_weather()), generate()], message_limit=2 * TURNS)
    [log] = eval(task, model=model, display="none", log_dir=mkdtemp(), max_retries=0)
    assert log.status == "success", log.error


def mini_swe_agent(url: str) -> None:
    """Its agent that writes commands into text, none of which is run."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import minisweagent
    import yaml
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

    class Nowhere:
        """Runs nothing."""

        config = None

        def execute(self, action: Any, **_: Any) -> dict[str, Any]:
            return {"output": "done", "returncode": 0, "exception_info": ""}

        def get_template_vars(self, **_: Any) -> dict[str, Any]:
            return {"system": "Linux", "release": "", "version": "", "machine": ""}

        def serialize(self) -> dict[str, Any]:
            return {}

    config = yaml.safe_load((minisweagent.package_dir / "config" / "mini_textbased.yaml").read_text())
    model = LitellmTextbasedModel(
        **config["model"]
        | {"model_name": "openai/smollm2", "model_kwargs": {"api_base": url, "api_key": "none"}}
        | {"cost_tracking": "ignore_errors"},
    )
    templates = {name: config["agent"][name] for name in ("system_template", "instance_template")}
    DefaultAgent(model, Nowhere(), **templates, step_limit=TURNS).run(_TASK)


if __name__ == "__main__":
    name, base = sys.argv[1:]
    if name in ("CodeAgent", "ToolCallingAgent"):
        smolagents(base, name)
    else:
        {"pydantic-ai": pydantic_ai, "inspect-ai": inspect_ai, "mini-swe-agent": mini_swe_agent}[name](base)
    print("{}")
