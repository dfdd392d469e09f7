"""Compacted conversations: a turn of the model writes the summary, and the client gets a name for it."""

from typing import Any

import httpx
import pytest

from tests.contract.formats.responses.dialogue import FUNCTION, engine_body, events_of, sdk
from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import user
from tests.support.tiny_model import END, SPLIT
from tokenproxy.formats.responses.answer import summary_message
from tokenproxy.formats.responses.format import COMPACT_PROMPT

_SUMMARY = Reply(SPLIT, message={"content": " The user said hi.\n", "reasoning": "secret"})
_TRIGGER = {"type": "compaction_trigger"}


def _items(client: httpx.Client, fake: FakeVllm, text: str, **fields: Any) -> list[dict[str, Any]]:
    """A conversation of one turn."""
    fake.replies.append(Reply(SPLIT))
    made = client.post("/v1/responses", json={"model": "tiny", "input": text, **fields}).json()
    return [user(text), *made["output"]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_trigger(client: httpx.Client, fake: FakeVllm, stream: bool) -> None:
    fields = {"tools": [FUNCTION], "store": False}
    items = _items(client, fake, f"Hi, {stream}", **fields)
    fake.replies.append(_SUMMARY)
    asked = {"model": "tiny", "input": [*items, _TRIGGER], "stream": stream, **fields}
    answer = client.post("/v1/responses", json=asked)
    body = engine_body(fake)
    assert body["messages"][-1] == user(COMPACT_PROMPT) and body["tool_choice"] == "none"
    # the prompt continues the conversation
    assert answer.headers["x-prompt-source"] == "extended"
    if stream:
        events = events_of(answer.content)
        kinds = ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
        assert [event["type"] for event in events] == [f"response.{kind}" for kind in kinds]
        response = events[-1]["response"]
        assert events[3]["item"] == response["output"][0]
    else:
        response = answer.json()
    [item] = response["output"]
    assert item.keys() == {"id", "type", "encrypted_content"} and item["type"] == "compaction"
    assert "said hi" not in answer.text and "secret" not in answer.text
    client.post("/v1/responses", json={"model": "tiny", "input": [item, user("And?")], **fields})
    assert engine_body(fake)["messages"] == [user(summary_message("The user said hi.")), user("And?")]


def test_the_route_returns_user_messages_and_the_compaction(client: httpx.Client, fake: FakeVllm) -> None:
    items = [*_items(client, fake, "Hi, compact"), user("more")]
    fake.replies.append(_SUMMARY)
    compacted = sdk(client).responses.compact(model="tiny", input=items, instructions="Be brief.")
    assert (compacted.object, compacted.usage.output_tokens) == ("response.compaction", len(SPLIT))
    assert engine_body(fake)["messages"][0] == {"role": "system", "content": "Be brief."}
    output = [item.to_dict() for item in compacted.output]
    sdk(client).responses.create(model="tiny", input=[*output, user("And?")])
    said = [message["content"] for message in engine_body(fake)["messages"]]
    texts = [[{"type": "text", "text": text}] for text in ("Hi, compact", "more")]
    assert said == [*texts, summary_message("The user said hi."), "And?"]


def test_a_compacted_conversation_of_stored_responses(client: httpx.Client, fake: FakeVllm) -> None:
    names: dict[str, Any] = {}
    for reply, new in ((Reply(SPLIT), "Hi, stored"), (_SUMMARY, [_TRIGGER]), (Reply(SPLIT), "And?")):
        fake.replies.append(reply)
        made = client.post("/v1/responses", json={"model": "tiny", "input": new, **names})
        names = {"previous_response_id": made.json()["id"]}
    said = [message["content"] for message in engine_body(fake)["messages"]]
    assert said == ["Hi, stored", summary_message("The user said hi."), "And?"]


def test_a_summary_that_was_not_written(client: httpx.Client, fake: FakeVllm) -> None:
    asked = {"model": "tiny", "input": [user("Hi"), _TRIGGER]}
    fake.replies.extend([Reply((END,), message={"content": " "}), Reply(SPLIT, finish="abort")])
    assert client.post("/v1/responses", json=asked).status_code == 502
    event = events_of(client.post("/v1/responses", json={**asked, "stream": True}).content)[-1]
    assert (event["type"], event["response"]["output"]) == ("response.failed", [])
