"""A plain HTTP client of the chat route of a server on a real engine."""

from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.acceptance.formats import CHAT, TOKENS, user

__all__ = ["CHAT", "TOKENS", "user"]

Message = dict[str, Any]


@dataclass
class Turn:
    """One response of the chat route."""

    source: str
    """Source of the prompt, with the reason if there is one."""
    prompt_ids: list[int]
    """What the engine consumed."""
    ids: list[int]
    """What the engine sampled."""


@dataclass
class Conversation:
    """A conversation as a client holds it: messages only."""

    http: httpx.Client
    messages: list[Message]
    options: dict[str, Any] = field(default_factory=dict)

    def ask(self, *new: Message, **options: Any) -> Turn:
        """Send the messages, and keep the answer."""
        self.messages = [*self.messages, *new]
        body = {"messages": self.messages, "return_token_ids": True, **self.options, **options}
        response = self.http.post(CHAT, json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        [choice] = answer["choices"]
        self.messages.append({"role": "assistant", "content": choice["message"]["content"]})
        reason = response.headers.get("x-prompt-reason")
        source = response.headers["x-prompt-source"] + (f": {reason}" if reason else "")
        return Turn(source, answer["prompt_token_ids"], choice["token_ids"])


def continues(turn: Turn, before: Turn) -> bool:
    """Whether a prompt begins with all that was consumed and sampled before."""
    ids = [*before.prompt_ids, *before.ids]
    return turn.source.startswith("extended") and turn.prompt_ids[: len(ids)] == ids
