"""verifiers 0.1.14 as it comes, with its token client: no id may drift, also where it leaves the token route.

A rollout is 13 turns of tool calls and words. Its first turn goes to the chat route. For the next ones the
client builds the prompt from ids that it got and two calls of `/tokenize`, and sends it with the messages to
the token route. After a turn that was cut by `max_tokens` it falls back to the chat route.

The loop is that of `MultiTurnEnv`, made of the library's own parts. To import the class itself takes pandas,
datasets, prime-sandboxes and eight more packages, and a server sees no difference.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from openai import AsyncOpenAI
from verifiers.clients import (
    OpenAIChatCompletionsClient,
    OpenAIChatCompletionsTokenClient,
)
from verifiers.types import (
    AssistantMessage,
    Messages,
    State,
    Tool,
    ToolMessage,
    TrajectoryStep,
    UserMessage,
)
from verifiers.utils.message_utils import concat_messages
from verifiers.utils.response_utils import (
    parse_response_message,
    parse_response_tokens,
)

from proxy.demo.stack import EngineProcess
from proxy.demo.tools import TOOLS, call_tool
from tests.campaign.real_vllm.conftest import FRONT, INSIDE
from tests.campaign.real_vllm.rollouts import MODEL, drifted
from tests.campaign.real_vllm.wire import COMPLETIONS, TOKENIZE, TOKENS, Wire

pytestmark = pytest.mark.timeout(900)

STOCK = "stock vLLM, by its chat route"
"""It has no token route; there the library's plain client holds the same rollouts."""
RUNS = {INSIDE: 3, FRONT: 3, STOCK: 2}
FOLLOW_UPS = 12

TOOL_DEFS = [
    Tool(
        name=tool["function"]["name"],
        description=tool["function"]["description"],
        parameters=tool["function"]["parameters"],
        strict=True,
    )
    for tool in TOOLS
]

SAYING = {"structured_outputs": {"regex": r"[A-Z][a-z]{1,7}( [a-z]{1,7}){1,4}[.!]"}}
"""Makes a turn short, and end by itself."""
CALL: dict[str, Any] = {"tool_choice": "required", "max_tokens": 96}
SAY: dict[str, Any] = {"tool_choice": "none", "max_tokens": 48, "extra_body": SAYING}
CUT: dict[str, Any] = {"tool_choice": "none", "max_tokens": 5, "extra_body": {"min_tokens": 5}}
CUT_CALL: dict[str, Any] = {"tool_choice": "required", "max_tokens": 20}
TURNS = (CALL, SAY, CUT, SAY, CALL, CUT, CUT, SAY, CALL, SAY, CUT_CALL, SAY, SAY)
"""Sampling arguments of each turn."""

QUESTIONS = (
    "Is it warmer in Paris or in Rome?",
    "How much is 18 * 7, and then 126 - 30?",
    "Add up the temperatures of Oslo and Bergen.",
    "I go to Lisbon for 12 days. What shall I wear?",
    "And how is the weather in Reykjavík?",
)


@dataclass
class Rollout:
    """One that was run, as the library has it and as it went over the wire."""

    state: State = field(default_factory=State, repr=False)
    wire: Wire = field(default_factory=Wire, repr=False)
    error: Exception | None = None

    async def run(self, client_class: type[OpenAIChatCompletionsClient], url: str, number: int) -> None:
        """Run it to its end, or to the first error."""
        self.state.update(model=MODEL, trajectory=[], trajectory_id=f"{number}")
        async with self.wire.open_client() as http:
            sdk = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=0)
            try:
                await self._turns(client_class(sdk), number)
            except Exception as error:  # noqa: BLE001 the tests of this rollout raise it
                self.error = error.__cause__ if isinstance(error.__cause__, Exception) else error

    async def _turns(self, client: OpenAIChatCompletionsClient, number: int) -> None:
        # The plain client asks for ids and log-probabilities only if told to; the other does so by itself.
        ids = {} if isinstance(client, OpenAIChatCompletionsTokenClient) else {"return_token_ids": True}
        messages: Messages = [UserMessage(content=QUESTIONS[number % len(QUESTIONS)])]
        for turn, options in enumerate(TURNS):
            sampling = {"temperature": 1.2, "seed": 100 * number + turn, "logprobs": True, **options}
            sampling["extra_body"] = {**options.get("extra_body", {}), **ids}
            response = await client.get_response(
                prompt=messages, model=MODEL, tools=TOOL_DEFS, sampling_args=sampling, state=self.state
            )
            completion = await parse_response_message(response)
            self.state["trajectory"].append(
                TrajectoryStep(
                    prompt=messages,
                    completion=completion,
                    response=response,
                    tokens=await parse_response_tokens(response),
                    reward=None,
                    advantage=None,
                    is_truncated=response.message.is_truncated or False,
                    trajectory_id=self.state["trajectory_id"],
                    extras={},
                )
            )
            messages = concat_messages([messages, completion, environment(completion[-1], turn)])

    def drifted(self) -> int:
        """Follow-up turns whose prompt does not begin with all ids before it, as the library saw them."""
        steps = [step["tokens"] for step in self.state["trajectory"]]
        return drifted([(tokens["prompt_ids"], tokens["completion_ids"]) for tokens in steps])


def environment(answer: AssistantMessage, turn: int) -> Messages:
    """What the environment answers: the results of the tools, or words."""
    calls = answer.tool_calls or []
    return [
        ToolMessage(tool_call_id=call.id, content=call_tool(call.name, call.arguments)) for call in calls
    ] or [UserMessage(content=f"Go on, please ({turn}).")]


Everything = dict[str, list[Rollout]]


@pytest.fixture(scope="module")
def everything(engines: dict[str, EngineProcess], proxies: dict[str, str]) -> Everything:
    """All rollouts, by server; they run at the same time."""
    urls = {INSIDE: engines["plugin"].url, FRONT: proxies[FRONT], STOCK: engines["stock"].url}
    everything: Everything = {server: [Rollout() for _ in range(RUNS[server])] for server in urls}
    running: list[Awaitable[None]] = []
    for server, rollouts in everything.items():
        client = OpenAIChatCompletionsClient if server == STOCK else OpenAIChatCompletionsTokenClient
        running += [rollout.run(client, urls[server], number) for number, rollout in enumerate(rollouts)]

    async def all_at_once() -> None:
        await asyncio.gather(*running)

    # With a factory the runner leaves the event loop of the other tests alone.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(all_at_once())
    return everything


def test_how_far_everything_drifts(everything: Everything, capsys: pytest.CaptureFixture[str]) -> None:
    """With a stock vLLM this measurement finds drift, so that finding none of it elsewhere says something."""
    counts = {
        server: sum(rollout.drifted() for rollout in rollouts) for server, rollouts in everything.items()
    }
    with capsys.disabled():
        print("\n  verifiers 0.1.14: follow-up turns that drifted")
        for server, rollouts in everything.items():
            turns = sum(len(rollout.state["trajectory"]) - 1 for rollout in rollouts)
            print(f"    {server:<30}  {counts[server]:>3} of {turns}")
    for rollout in everything[STOCK]:
        if rollout.error is not None:
            raise rollout.error
    assert counts[STOCK] > 0


@pytest.mark.parametrize("number", range(RUNS[INSIDE]))
@pytest.mark.parametrize("name", [INSIDE, FRONT])
def test_no_turn_drifts(everything: Everything, name: str, number: int) -> None:
    rollout = everything[name][number]
    if rollout.error is not None:
        raise rollout.error
    assert len(rollout.state["trajectory"]) - 1 == len(rollout.wire.turns) - 1 == FOLLOW_UPS
    fallbacks = _check_routes(rollout)
    assert rollout.drifted() == 0, rollout.wire.sources()
    _check_ids(rollout, fallbacks)


def _check_routes(rollout: Rollout) -> list[int]:
    """The client went the ways that it should; the turns that fell back to the chat route."""
    cut = [step["is_truncated"] for step in rollout.state["trajectory"]]
    stitched = [TOKENIZE, TOKENIZE, TOKENS]
    expected = [[COMPLETIONS], *([COMPLETIONS] if before else stitched for before in cut[:-1])]
    assert rollout.wire.paths == [path for paths in expected for path in paths]
    fallbacks = [turn for turn, before in enumerate(cut[:-1], start=1) if before]
    after_ids = [turn for turn in fallbacks if expected[turn - 1] == stitched]
    assert len(after_ids) >= 2, "the chat route must continue what the token route sampled"
    return fallbacks


def _check_ids(rollout: Rollout, fallbacks: list[int]) -> None:
    """The library got what went over the wire, the engine what it was given; fallbacks extend all before."""
    tokens = [step["tokens"] for step in rollout.state["trajectory"]]
    assert [(one["prompt_ids"], one["completion_ids"]) for one in tokens] == rollout.wire.ids()
    assert all(len(one["completion_ids"]) == len(one["completion_logprobs"]) > 0 for one in tokens)
    turns = rollout.wire.turns
    assert turns[0].source == "rendered: first_turn"
    for number, (before, turn) in enumerate(pairwise(turns), start=1):
        if number in fallbacks:
            assert turn.source == "extended", rollout.wire.sources()
            assert int(turn.headers["x-prompt-reused"]) == len(before.prompt_ids) + len(before.ids)
        else:
            assert rollout.wire.requests[number]["tokens"] == turn.prompt_ids
