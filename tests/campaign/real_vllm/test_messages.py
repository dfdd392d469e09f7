"""`POST /v1/messages` on a real engine, with the official SDK: exact over turns, at first equal to vLLM's."""

import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import anthropic
import httpx
import pytest

from proxy.demo.stack import EngineProcess
from tests.campaign.real_vllm.conftest import Served
from tests.campaign.real_vllm.plain import SESSIONS
from tests.support.message_shapes import SHAPES, Shape, user

_MODEL = "smollm2"
_LOOK: dict[str, Any] = {
    "name": "look",
    "description": "Looks somewhere.",
    "strict": True,
    "input_schema": {
        "type": "object",
        "properties": {"where": {"type": "string", "enum": ["here", "there"]}},
        "required": ["where"],
        "additionalProperties": False,
    },
}
_NOT_HERE = ("thinking with a budget", "a name of a model")
"""The engine has no reasoning parser and no adapter."""
_FIRST_TURNS = {name: shape for name, shape in SHAPES.items() if name not in _NOT_HERE}


@pytest.fixture
def sdk(server: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def http(server: Served) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def _turns(http: httpx.Client, session: str, count: int) -> list[dict[str, Any]]:
    """The recorded turns of a session, oldest first."""
    deadline = time.monotonic() + 20
    while True:
        turns: list[dict[str, Any]] = http.get(f"{SESSIONS}/{session}", params={"ids": "true"}).json()[
            "turns"
        ]
        if len(turns) == count or time.monotonic() > deadline:
            return turns
        time.sleep(0.1)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_four_turns_are_exact(
    server: Served, sdk: anthropic.Anthropic, http: httpx.Client, stream: bool
) -> None:
    session = f"messages-{uuid4().hex}"
    options: dict[str, Any] = {
        "model": _MODEL,
        "max_tokens": 64,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "tools": [_LOOK],
        "extra_headers": {"x-session-id": session},
        "extra_query": {"beta": "true"},
    }
    asked = [user("Look around."), None, user("What did you see?"), user("And then?")]
    choices = [{"type": "any"}, {"type": "none"}, {"type": "none"}, {"type": "none"}]
    messages: list[Any] = []
    reported, answer = [], None
    for question, choice in zip(asked, choices, strict=True):
        if question is None:
            assert answer is not None and answer.stop_reason == "tool_use"
            calls = [block for block in answer.content if block.type == "tool_use"]
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": "A tree."} for call in calls
            ]
            question = user(*results, {"type": "text", "text": "Go on."})
        messages.append(question)
        asking: dict[str, Any] = {**options, "tool_choice": choice, "messages": messages}
        if stream:
            with sdk.messages.stream(**asking) as events:
                answer = events.get_final_message()
                headers = dict(events.response.headers)
        else:
            raw = sdk.messages.with_raw_response.create(**asking)
            answer, headers = raw.parse(), dict(raw.headers)
        messages.append({"role": "assistant", "content": answer.content})
        reported.append((headers, answer.usage))
    turns, so_far = _turns(http, session, 4), 0
    for index, (turn, (headers, usage)) in enumerate(zip(turns, reported, strict=True)):
        # by the engine's own count, the prompt is what was read and sampled before, and what was appended
        prompt = so_far + len(turn["appended_ids"])
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == prompt
        assert headers["x-prompt-source"] == ("extended" if index else "rendered")
        assert int(headers["x-prompt-reused"]) == so_far
        assert usage.output_tokens == len(turn["completion_ids"])
        so_far = prompt + len(turn["completion_ids"])
    asking = {**options, "tool_choice": {"type": "none"}, "messages": [*messages, user("Thanks.")]}
    del asking["max_tokens"]
    counted = sdk.messages.count_tokens(**asking)
    assert counted.input_tokens > so_far


@pytest.mark.parametrize("shape", _FIRST_TURNS.values(), ids=_FIRST_TURNS)
def test_a_first_turn_has_the_ids_of_vllms_own_route(
    http: httpx.Client, engines: dict[str, EngineProcess], shape: Shape
) -> None:
    fields = {name: value for name, value in shape.fields.items() if not name.startswith("extra_")}
    body = {"model": _MODEL, **fields, "max_tokens": 4, "messages": shape.messages}
    session = f"first-{uuid4().hex}"
    theirs = httpx.post(f"{engines['stock'].url}/v1/messages/render", json=body, timeout=60)
    assert theirs.status_code == 200, theirs.text
    ours = http.post("/v1/messages", json=body, headers={"x-session-id": session})
    assert ours.status_code == 200, ours.text
    [turn] = _turns(http, session, 1)
    assert turn["appended_ids"] == theirs.json()["token_ids"]
    usage = ours.json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(turn["appended_ids"])
    counted = http.post("/v1/messages/count_tokens", json=body).json()
    assert counted == {"input_tokens": len(turn["appended_ids"])}


def test_prompts_and_limits_beyond_the_context(sdk: anthropic.Anthropic) -> None:
    message = sdk.messages.create(
        model=_MODEL, max_tokens=16_000, messages=[{"role": "user", "content": "Hi"}], stop_sequences=["e"]
    )
    assert message.stop_reason in ("stop_sequence", "end_turn")
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 8192 maximum"):
        sdk.messages.create(model=_MODEL, max_tokens=8, messages=[{"role": "user", "content": "x y " * 5000}])
    with pytest.raises(anthropic.NotFoundError, match="model: "):
        sdk.messages.create(model="nope", max_tokens=8, messages=[{"role": "user", "content": "Hi"}])


def test_probes(server: Served, http: httpx.Client) -> None:
    assert http.head("/").status_code == 200
    assert http.get("/").json() == {"status": "ok"}
