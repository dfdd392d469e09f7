"""What clients that nobody here wrote send and get, seen from their HTTP client; nothing is changed."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2
from openai import DefaultAsyncHttpxClient

from tests.campaign.real_vllm.rollouts import Message, Record, Turn, add, check_samples, check_seen, record_of
from tests.campaign.real_vllm.rollouts import open_client as open_sdk

COMPLETIONS = "/chat/completions"
TOKENS = "/chat/completions/tokens"
TOKENIZE = "/tokenize"


@dataclass
class Wire:
    """The requests of one conversation that were answered, in order."""

    paths: list[str] = field(default_factory=list)
    """Of every request, without the API's version."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    """The body of each request for a completion."""
    turns: list[Turn] = field(default_factory=list)
    """What each of them brought."""

    def open_client(self) -> httpx2.AsyncClient:
        """The HTTP client of the OpenAI SDK as it comes, and this watches it."""
        return DefaultAsyncHttpxClient(event_hooks={"response": [self._note]}, timeout=280)

    async def _note(self, response: httpx2.Response) -> None:
        body = await response.aread()
        if response.status_code != 200:
            return  # the SDK raises, with the body
        path = urlsplit(str(response.request.url)).path.removeprefix("/v1")
        self.paths.append(path)
        if path in (COMPLETIONS, TOKENS):
            self.requests.append(json.loads(response.request.content))
            self.turns.append(_turn(response.headers, list(json_events(body))))

    def ids(self, record: Record | None = None) -> list[tuple[list[int], list[int]]]:
        """Prompt and completion of each turn: as they came, or as recorded if the client requested none."""
        pairs = []
        for turn in self.turns:
            if turn.prompt_ids:
                pairs.append((turn.prompt_ids, turn.ids))
            else:
                assert record is not None, "the client requested no ids, and nothing was recorded"
                kept = record.of(turn)
                pairs.append((record.prompt(kept), list(kept["completion_ids"])))
        return pairs

    def sources(self) -> list[str]:
        """Source of each turn's prompt, with the reason if there is one."""
        return [turn.source for turn in self.turns]

    def repaired(self) -> list[bool]:
        """For each turn whether its request brings back the calls of the turn before with other arguments.

        Arguments that are the same JSON in another spelling are the same.
        """
        found = [False]
        for before, request in zip(self.turns, self.requests[1:], strict=False):
            echoed = [m for m in request["messages"] if m["role"] == "assistant"][-1]
            found.append(_arguments(echoed) != _arguments(before.message))
        return found

    async def record(self, url: str) -> Record:
        """What the server at `url` recorded of the conversation, also if it took it for several."""
        sessions = {turn.headers.get("x-session-id"): None for turn in self.turns}
        whole = Record([], [], [])
        async with open_sdk(f"{url}/v1") as client:
            for session in filter(None, sessions):
                one = await record_of(client, session)
                whole.turns.extend(one.turns)
                whole.samples.extend(one.samples)
                whole.refused.extend(one.refused)
        return whole


def check_chain(record: Record, turns: Sequence[Turn]) -> None:
    """A conversation is recorded as one chain and one sample, as its client saw it and the engine counted."""
    assert [turn["id"] for turn in record.turns] == [record.of(turn)["id"] for turn in turns]
    assert [turn["parent"] for turn in record.turns] == [None, *(turn["id"] for turn in record.turns[:-1])]
    for turn in turns:
        check_seen(record, turn)
    check_samples(record)
    assert len(record.samples) == 1


def _turn(headers: httpx2.Headers, events: Sequence[dict[str, Any]]) -> Turn:
    turn = Turn(headers, 0, {"role": "assistant", "content": ""})
    for event in events:
        turn.usage = event.get("usage") or turn.usage
        turn.prompt_ids = event.get("prompt_token_ids") or turn.prompt_ids
        for choice in event["choices"]:
            if "message" in choice:
                turn.message = choice["message"]
            else:
                add(turn.message, choice["delta"])
            turn.ids += choice.get("token_ids") or []
            turn.finish_reason = choice.get("finish_reason") or turn.finish_reason
            content = (choice.get("logprobs") or {}).get("content") or []
            turn.logprobs += [entry["logprob"] for entry in content]
    return turn


def json_events(body: bytes) -> Iterator[dict[str, Any]]:
    """The one JSON object of an answer, or those of its stream."""
    if body.startswith(b"{"):
        yield json.loads(body)
        return
    for line in body.decode().splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _arguments(message: Message) -> list[Any]:
    return [_parsed(call["function"]["arguments"]) for call in message.get("tool_calls") or []]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
