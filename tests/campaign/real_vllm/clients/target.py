"""Where a client is to go, and what it says there."""

import json
from dataclasses import dataclass, field

import httpx2
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

MODEL = "smollm2"
QUESTIONS = (
    ("Is it warmer in Paris or in Rome?", "required", True),
    ("And so?", "none", False),
    ("How much is 18 * 7?", "required", False),
    ("Thank you!", "none", True),
)
"""What the user says, whether the model must call a tool then, and whether the answer is a stream."""


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
