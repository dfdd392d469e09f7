"""Rollouts on a real engine, and the viewer's page that shows them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from proxy.demo.stack import MODEL_NAME
from tests.support.viewer.browser import PageOptions, Viewer, run_browser, watched_page


@dataclass
class Rollout:
    """A session that a client made on the engine."""

    http: httpx.AsyncClient
    name: str

    async def turn(self, *messages: Any, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        """The choice that answers messages; it holds the ids and log-probabilities."""
        asked = {"model": MODEL_NAME, "messages": messages, "max_tokens": 12, "return_token_ids": True}
        named = {"X-Session-ID": self.name, **(headers or {})}
        answer = await self.http.post("/v1/chat/completions", json=asked | fields, headers=named)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        return {**found["choices"][0], "prompt_token_ids": found["prompt_token_ids"]}

    async def leave(self, *messages: Any) -> None:
        """Ask for a long answer, and go away after its beginning."""
        asked = {"model": MODEL_NAME, "messages": messages, "max_tokens": 400, "stream": True}
        fields = {"ignore_eos": True}
        async with self.http.stream(
            "POST", "/v1/chat/completions", json=asked | fields, headers={"X-Session-ID": self.name}
        ) as response:
            lines = response.aiter_lines()
            for _ in range(12):
                await anext(lines)

    async def get(self, path: str) -> Any:
        answer = await self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()


@asynccontextmanager
async def open_page(url: str, options: PageOptions | None = None) -> AsyncIterator[Viewer]:
    """The viewer of a server in a browser of its own; nothing is open yet."""
    async with run_browser() as browser, watched_page(browser, url, options) as viewer:
        yield viewer


async def wait_for_count(viewer: Viewer, selector: str, number: int) -> None:
    """Wait until a number of elements is shown."""
    await viewer.page.wait_for_function(
        "([selector, number]) => document.querySelectorAll(selector).length === number",
        arg=[selector, number],
    )
