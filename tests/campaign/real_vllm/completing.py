"""Requests of completions and of generate, and their answers: whole, or put together from a stream."""

import secrets
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.campaign.real_vllm.test_token_route import events

ROUTE = "/v1/completions"
GENERATE = "/inference/v1/generate"
Body = dict[str, Any]

every_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def fresh_ids(count: int = 12) -> list[int]:
    """Ids that no other test sends."""
    return [1000 + secrets.randbelow(30_000) for _ in range(count)]


def complete(
    http: httpx.Client, route: str = ROUTE, *, session: str | None = None, **body: Any
) -> httpx.Response:
    headers = {"x-session-id": session} if session else {}
    response = http.post(route, json={"model": "smollm2", **body}, headers=headers)
    assert response.status_code == 200, response.text
    return response


def choices_of(response: httpx.Response, stream: bool) -> list[Body]:
    """The choices of an answer, with the pieces of a stream put together."""
    if not stream:
        choices: list[Body] = response.json()["choices"]
        return choices
    made: dict[int, Body] = {}
    for chunk in events(response):
        for piece in chunk["choices"]:
            choice = made.setdefault(piece["index"], {"text": "", "token_ids": [], "logprobs": []})
            choice["text"] += piece.get("text") or ""
            choice["token_ids"] += piece.get("token_ids") or []
            logprobs = piece.get("logprobs") or {}
            choice["logprobs"] += logprobs.get("token_logprobs") or []
            choice["logprobs"] += [entry["logprob"] for entry in logprobs.get("content") or []]
            for name in ("prompt_token_ids", "weight_versions", "finish_reason"):
                choice[name] = piece.get(name) or choice.get(name)
    return [choice for _, choice in sorted(made.items())]


def logprobs_of(choice: Body) -> list[float]:
    logprobs = choice["logprobs"]
    return logprobs if isinstance(logprobs, list) else logprobs["token_logprobs"]


def samples_of(http: httpx.Client, session: str) -> list[Body]:
    answer = http.get(f"/v1/sessions/{session}/samples").json()
    assert answer["refused"] == []
    samples: list[Body] = answer["samples"]
    return samples


def without_ids(value: Any) -> Any:
    """An answer without what differs between two equal requests: id, time, and the last digits of numbers."""
    if isinstance(value, dict):
        left_out = ("id", "created", "request_id", "prompt_tokens_details")
        return {name: without_ids(one) for name, one in value.items() if name not in left_out}
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    return round(value, 1) if isinstance(value, float) else value


def until_equal(ask: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Two answers to one request, asked for again while they differ.

    Which prompts share a step of an engine changes the last digits of its numbers, and so, where two tokens
    are nearly as probable, the one that is sampled.
    """
    for _ in range(20):
        ours, stock = ask()
        if ours == stock:
            break
    return ours, stock


def keys_of(chunks: list[Body]) -> set[str]:
    """The names in chunks and their choices, and which of them are always null."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    found = {name for chunk in chunks for name in chunk} | {
        f"choices.{name}" for one in choices for name in one
    }
    return found | {
        f"{name} is null" for one in choices[:1] for name in one if all(c[name] is None for c in choices)
    }


def joined(chunks: list[Body]) -> Body:
    """Each choice of a stream, put together from its chunks; without ids and times."""
    joined: dict[int, Body] = {}
    for piece in (piece for chunk in chunks for piece in chunk["choices"]):
        choice = joined.setdefault(piece["index"], dict.fromkeys(piece))
        for name, value in piece.items():
            before = choice.get(name)
            if isinstance(before, dict) and value is not None:
                choice[name] = {key: before[key] + value[key] for key in before}
            elif isinstance(before, str | list) and value is not None and name != "finish_reason":
                choice[name] = before + value
            elif value is not None:
                choice[name] = value
    totals = [chunk for chunk in chunks if not chunk["choices"]]
    whole = {"choices": [choice for _, choice in sorted(joined.items())], "totals": totals}
    return {**without_ids(whole), "keys": keys_of(chunks)}
