"""A proxy with a feed, as its clients use it."""

import secrets
from typing import Any

import httpx

from tests.support.talk import CHAT, user

FEED = "/v1/samples"


class Feed:
    """A proxy with a feed of its own."""

    def __init__(self, client: httpx.Client, key: str = "") -> None:
        self.client = client
        self.headers = {"authorization": f"Bearer {key}"} if key else {}

    def finish(self, name: str, reward: float | None = 1.0, **metadata: Any) -> str:
        """A rollout of one turn; without a reward it is ended."""
        self.describe(name, **metadata)
        self.turn(name)
        return self.reward(name, reward) if reward is not None else self.end(name)

    def describe(self, name: str, **metadata: Any) -> None:
        self._post("/v1/sessions", {"id": name, "metadata": metadata})

    def turn(self, name: str) -> str:
        """Sample a turn in a session; its id."""
        messages = [user(secrets.token_hex(4))]
        headers = {"x-session-id": name}
        return str(self._post(CHAT, {"messages": messages}, **headers).headers["x-turn-id"])

    def reward(self, name: str, reward: float, **fields: Any) -> str:
        self._post(f"/v1/sessions/{name}/reward", {"reward": reward, **fields})
        return name

    def end(self, name: str) -> str:
        self._post(f"/v1/sessions/{name}/end", {})
        return name

    def read(self, **query: Any) -> dict[str, Any]:
        """One response."""
        answer = self.client.get(FEED, params=query, headers=self.headers)
        assert answer.status_code == 200, answer.text
        page: dict[str, Any] = answer.json()
        assert page["object"] == "list"
        return page

    def names(self, **query: Any) -> list[str]:
        """The rollouts of one response."""
        return [rollout["rollout"] for rollout in self.read(**query)["data"]]

    def acknowledge(self, consumer: str, cursor: str) -> str:
        answer = self._post(f"{FEED}/ack", {"consumer": consumer, "cursor": cursor}).json()
        assert answer["consumer"] == consumer
        return str(answer["cursor"])

    def consumers(self) -> list[dict[str, Any]]:
        listed = self.client.get(f"{FEED}/consumers", headers=self.headers).json()
        return list(listed["data"])

    def _post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        answer = self.client.post(path, json=body, headers={**self.headers, **headers})
        assert answer.status_code in (200, 201), answer.text
        return answer
