"""A plain HTTP client of a server on a real engine. It can force what is sampled, for equal answers."""

from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.acceptance.formats import CHAT, TOKENS, user
from tests.support.recorded import SESSIONS

__all__ = ["CHAT", "SESSIONS", "TOKENS", "user"]

Message = dict[str, Any]


def forced(token: int, count: int = 2) -> dict[str, Any]:
    """Options with which the engine samples one token, `count` times."""
    return {"logit_bias": {str(token): 100.0}, "max_tokens": count, "temperature": 0}


@dataclass
class Turn:
    """One response of the chat route."""

    response: httpx.Response

    @property
    def source(self) -> str:
        """Source of the prompt, with the reason if there is one."""
        reason = self.response.headers.get("x-prompt-reason")
        return self.response.headers["x-prompt-source"] + (f": {reason}" if reason else "")

    @property
    def session(self) -> str:
        """The rollout that it was recorded in."""
        return self.response.headers["x-session-id"]

    @property
    def prompt_ids(self) -> list[int]:
        """What the engine consumed."""
        ids: list[int] = self.response.json()["prompt_token_ids"]
        return ids

    @property
    def ids(self) -> list[int]:
        """What the engine sampled."""
        ids: list[int] = self.response.json()["choices"][0]["token_ids"]
        return ids


@dataclass
class Conversation:
    """A conversation as a client holds it: messages only."""

    http: httpx.Client
    messages: list[Message]
    options: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    def ask(self, *new: Message, path: str = CHAT, **options: Any) -> Turn:
        """Send the messages, and keep the answer."""
        self.messages = [*self.messages, *new]
        body = {"messages": self.messages, "return_token_ids": True, **self.options, **options}
        response = self.http.post(path, json=body, headers=self.headers)
        assert response.status_code == 200, response.text
        answer = response.json()["choices"][0]["message"]
        self.messages.append({"role": "assistant", "content": answer["content"]})
        return Turn(response)


def continues(turn: Turn, before: Turn) -> bool:
    """Whether a prompt begins with all that was consumed and sampled before."""
    ids = [*before.prompt_ids, *before.ids]
    return turn.source.startswith("extended") and turn.prompt_ids[: len(ids)] == ids
