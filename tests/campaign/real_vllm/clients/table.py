"""The clients, none of which was written for the proxy: each holds a conversation at a base URL."""

import json
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx2
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from proxy.demo.tools import TOOLS
from tests.campaign.real_vllm.clients.programs import run_program

MODEL = "smollm2"
ROOT = Path(__file__).parents[4]
NODE = ROOT / ".cache" / "openai-node"
QUESTIONS = (
    ("Is it warmer in Paris or in Rome?", "required"),
    ("And so?", "none"),
    ("How much is 18 * 7?", "required"),
    ("Thank you!", "none"),
)
"""What the user says, and whether the model must call a tool then."""


@dataclass
class Target:
    """Where a client is to go. A session's name is in the base URL; None where the server has none."""

    url: str
    session: str | None
    ids: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Prompt and completion of each turn, as the engine's own answers show them."""

    @property
    def root(self) -> str:
        """The base URL without the API's version."""
        return f"{self.url}/sessions/{self.session}" if self.session else self.url

    def sdk(self) -> AsyncOpenAI:
        """OpenAI's SDK as it comes; its HTTP client notes the ids that pass."""
        http = DefaultAsyncHttpxClient(event_hooks={"response": [self._note]}, timeout=280)
        return AsyncOpenAI(base_url=f"{self.root}/v1", api_key="none", http_client=http, max_retries=0)

    async def _note(self, response: httpx2.Response) -> None:
        body = await response.aread()
        if response.status_code != 200 or not response.request.url.path.endswith(("completions", "tokens")):
            return
        streamed = [line[6:] for line in body.splitlines() if line.startswith(b"data: {")]
        events = [json.loads(line) for line in streamed or [body]]
        choices = [choice for event in events for choice in event["choices"]]
        sampled = [token for choice in choices for token in choice.get("token_ids") or []]
        self.ids.append((events[0].get("prompt_token_ids") or [], sampled))

    def drifted(self) -> int:
        """Follow-up turns whose prompt does not begin with all ids of the turn before."""
        pairs = zip(self.ids, self.ids[1:], strict=False)
        return sum(after[0][: len(prompt + ids)] != prompt + ids for (prompt, ids), after in pairs)


async def node(target: Target, *, stream: bool) -> None:
    """OpenAI's SDK for Node."""
    script = Path(__file__).parent / "openai_node.mjs"
    arguments = (NODE, f"{target.root}/v1", target.session, json.dumps(list(TOOLS)))
    await run_program("node", script, *arguments, *(["stream"] if stream else []))


Client = Callable[[Target], Awaitable[None]]


def clients() -> dict[str, Client]:
    """All clients that are installed, by name."""
    from tests.campaign.real_vllm.clients import agents_sdk, langchain, sdks, trainers, verifiers_client

    found: dict[str, Client] = {
        "OpenAI SDK": sdks.hold_openai,
        "OpenAI SDK, streamed": partial(sdks.hold_openai, stream=True),
        "OpenAI SDK, messages rewritten": partial(sdks.hold_openai, habit=sdks.rewritten),
        "Responses": partial(sdks.hold_responses, stores=False, stream=True),
        "Responses, stored": partial(sdks.hold_responses, stores=True, stream=False),
        "Anthropic SDK": partial(sdks.hold_anthropic, stream=False),
        "Anthropic SDK, streamed": partial(sdks.hold_anthropic, stream=True),
        "OpenAI Agents SDK": partial(agents_sdk.hold, stream=False),
        "OpenAI Agents SDK, streamed": partial(agents_sdk.hold, stream=True),
        "LangChain, calls that are cut": langchain.hold_cut,
        "LangGraph": langchain.hold_react,
        "verifiers": verifiers_client.hold,
        "NeMo-Gym": partial(trainers.hold_nemo_gym, ids=False),
        "NeMo-Gym, ids in both places": partial(trainers.hold_nemo_gym, ids=True),
        "TRL": trainers.hold_trl,
    }
    if (NODE / "node_modules").exists() and shutil.which("node"):
        found |= {
            "OpenAI SDK for Node": partial(node, stream=False),
            "OpenAI SDK for Node, streamed": partial(node, stream=True),
        }
    return found
