"""The events of a stream: their order, their ids, and what OpenAI's SDK makes of them."""

from typing import Any

import httpx
import pytest

from tests.contract.formats.responses.dialogue import FUNCTION, Event, engine_body, events_of
from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import call
from tests.support.tiny_model import SPLIT
from tokenproxy.record.echo import turn_in

_CALLS = [f"chatcmpl-tool-{digit * 32}" for digit in "ab"]
_TURN = {
    "reasoning": "so",
    "content": "well",
    "tool_calls": [call(identity=_CALLS[0]), call("g", '{"b": 1}', _CALLS[1])],
}
_TOOLS = [FUNCTION, {**FUNCTION, "name": "g"}]


def _stream(client: httpx.Client, **fields: Any) -> list[Event]:
    response = client.post("/v1/responses", json={"input": "Hi", "stream": True, **fields})
    return events_of(response.content)


def _kinds(events: list[Event]) -> list[str]:
    """Types without `response.`, repeated ones once."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    return [kind for index, kind in enumerate(kinds) if index == 0 or kinds[index - 1] != kind]


_MESSAGE = [
    "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
    "output_item.done",
]  # fmt: skip
_CALL = ["function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
_REASONING = [
    "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
    "content_part.done", "output_item.done",
]  # fmt: skip


def test_a_turn_of_all_kinds(client: httpx.Client, fake: FakeVllm) -> None:
    fake.replies.append(Reply(SPLIT, message=_TURN, finish="tool_calls"))
    events = _stream(client, tools=_TOOLS)
    calls = ["output_item.added", *_CALL, "output_item.added", *_CALL]
    assert _kinds(events) == ["created", "in_progress", *_REASONING, *_MESSAGE, *calls, "completed"]
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert added == [item["id"] for item in done] and len(set(added)) == 4
    assert events[-1]["response"]["output"] == done
    assert all(event["item_id"] == added[event["output_index"]] for event in events if "item_id" in event)
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    usage = events[-1]["response"]["usage"]
    assert (usage["output_tokens"], usage["total_tokens"]) == (6, usage["input_tokens"] + 6)


def test_a_custom_tool(client: httpx.Client, fake: FakeVllm) -> None:
    reply = Reply(SPLIT, message={"content": None, "tool_calls": [call("sh", '{"input": "ls é"}', "c1")]})
    fake.replies.extend([reply] * 2)
    tools: list[Any] = [{"type": "custom", "name": "sh"}]
    events = _stream(client, tools=tools)
    kinds = ["custom_tool_call_input.delta", "custom_tool_call_input.done"]
    assert _kinds(events)[2:-1] == ["output_item.added", *kinds, "output_item.done"]
    whole = client.post("/v1/responses", json={"input": "Hi", "tools": tools}).json()
    for response in (events[-1]["response"], whole):
        [item] = response["output"]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "sh", "ls é")


@pytest.mark.parametrize("own_limit", [True, False])
def test_a_turn_that_is_cut(client: httpx.Client, fake: FakeVllm, own_limit: bool) -> None:
    """Codex repeats a request whose stream ends with `response.incomplete`: not where it set no limit."""
    fake.replies.append(Reply(SPLIT[:3]))
    events = _stream(client, **({"max_output_tokens": 3} if own_limit else {}))
    assert events[-1]["type"] == ("response.incomplete" if own_limit else "response.completed")
    response = events[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert engine_body(fake).get("max_tokens") == (3 if own_limit else None)


def test_log_probabilities(client: httpx.Client, fake: FakeVllm) -> None:
    fake.replies.append(Reply(SPLIT))
    response = _stream(client, include=["message.output_text.logprobs"])[-1]["response"]
    logprobs = response["output"][0]["content"][0]["logprobs"]
    assert [entry["logprob"] for entry in logprobs][:2] == [-74 / 8, -71 / 8]
    assert logprobs[0].keys() == {"token", "bytes", "logprob", "top_logprobs"}


def test_encrypted_content_holds_no_text(client: httpx.Client, fake: FakeVllm) -> None:
    for include, expected in (([], False), (["reasoning.encrypted_content"], True)):
        fake.replies.append(Reply(SPLIT, message={"reasoning": "secret", "content": "well"}))
        answer = client.post("/v1/responses", json={"input": "Hi", "include": include})
        encrypted = answer.json()["output"][0]["encrypted_content"]
        assert (encrypted is not None) is expected
        assert not expected or turn_in(encrypted) == answer.headers["x-turn-id"]
