"""verifiers 0.1.14 with its token client: it builds prompts from ids, and falls back to the chat route.

Its first turn goes to the chat route. For the next ones the client builds the prompt from ids that it got and
two calls of `/tokenize`, and sends it with the messages to the token route. After a turn that was cut by
`max_tokens` it falls back to the chat route. The loop is that of `MultiTurnEnv`, made of the library's own
parts: to import the class itself takes eleven more packages, and a server sees no difference.
"""

from typing import Any

from verifiers.clients import OpenAIChatCompletionsClient, OpenAIChatCompletionsTokenClient
from verifiers.types import AssistantMessage, Messages, State, Tool, ToolMessage, TrajectoryStep, UserMessage
from verifiers.utils.message_utils import concat_messages
from verifiers.utils.response_utils import parse_response_message, parse_response_tokens

from tests.campaign.real_vllm.clients.target import MODEL, Target
from tokenproxy.demo.tools import TOOLS, call_tool

_TOOLS = [
    Tool(name=f["name"], description=f["description"], parameters=f["parameters"], strict=True)
    for f in (tool["function"] for tool in TOOLS)
]
_SAYING = {"structured_outputs": {"regex": r"[A-Z][a-z]{1,7}( [a-z]{1,7}){1,4}[.!]"}}
"""Makes a turn short, and end by itself."""
_CALL: dict[str, Any] = {"tool_choice": "required", "max_tokens": 96}
_SAY: dict[str, Any] = {"tool_choice": "none", "max_tokens": 48, "extra_body": _SAYING}
_CUT: dict[str, Any] = {"tool_choice": "none", "max_tokens": 5, "extra_body": {"min_tokens": 5}}
_CUT_CALL: dict[str, Any] = {"tool_choice": "required", "max_tokens": 20}
_TURNS = (_CALL, _SAY, _CUT, _SAY, _CALL, _CUT, _CUT, _SAY, _CUT_CALL, _SAY, _SAY)
"""Sampling arguments of each turn."""


async def hold(target: Target) -> None:
    """A rollout of tool calls and words, of which some are cut."""
    token_route = target.session is not None
    kind = OpenAIChatCompletionsTokenClient if token_route else OpenAIChatCompletionsClient
    # The plain client asks for ids only if told to; the other does so by itself.
    ids = {} if token_route else {"return_token_ids": True}
    state = State()
    state.update(model=MODEL, trajectory=[], trajectory_id="0")
    messages: Messages = [UserMessage(content="Is it warmer in Paris or in Rome?")]
    async with target.sdk() as sdk:
        client = kind(sdk)
        for turn, options in enumerate(_TURNS):
            sampling = {"temperature": 1.2, "logprobs": True, **options}
            sampling["extra_body"] = {**options.get("extra_body", {}), **ids}
            response = await client.get_response(
                prompt=messages, model=MODEL, tools=_TOOLS, sampling_args=sampling, state=state
            )
            completion = await parse_response_message(response)
            tokens = await parse_response_tokens(response)
            step = {"prompt": messages, "completion": completion, "response": response, "tokens": tokens}
            step |= {"reward": None, "advantage": None, "trajectory_id": "0", "extras": {}}
            step["is_truncated"] = response.message.is_truncated or False
            state["trajectory"].append(TrajectoryStep(**step))
            messages = concat_messages([messages, completion, _environment(completion[-1], turn)])
    seen = [(step["tokens"]["prompt_ids"], step["tokens"]["completion_ids"]) for step in state["trajectory"]]
    assert seen == target.ids


def _environment(answer: AssistantMessage, turn: int) -> Messages:
    """What the environment answers: the results of the tools, or words."""
    calls = answer.tool_calls or []
    results = [ToolMessage(tool_call_id=c.id, content=call_tool(c.name, c.arguments)) for c in calls]
    return results or [UserMessage(content=f"Go on, please ({turn}).")]
