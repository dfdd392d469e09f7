"""`/v1/responses` with OpenAI's SDK on real engines: every prompt continues the ids of the turn before it."""

from typing import Any

import httpx
import pytest

from tests.campaign.real_vllm.conftest import Served, only_in_front
from tests.campaign.real_vllm.plain import SESSIONS

_LOOK = {
    "type": "function",
    "name": "look",
    "description": "Looks.",
    "parameters": {
        "type": "object",
        "properties": {"where": {"type": "string", "enum": ["door", "wall"]}},
        "required": ["where"],
        "additionalProperties": False,
    },
    "strict": False,
}
_SAMPLING = {"temperature": 1.3, "max_output_tokens": 32}
_CODEX = {
    "instructions": "You are terse.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<cwd>/tmp</cwd>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look there."}] * 2},
    ],
    "tools": [
        _LOOK,
        {"type": "namespace", "name": "mcp", "description": "d", "tools": [{**_LOOK, "name": "see"}]},
        {"type": "custom", "name": "sh", "description": "Runs a command."},
    ],
}


class _Talk:
    """A conversation; each turn is checked against the counts of the engine."""

    def __init__(self, served: Served, session: str, *, stream: bool, stores: bool) -> None:
        self._client: Any = served.client().with_options(default_headers={"X-Session-ID": session})
        self._stream = stream
        self._stores = stores
        self._items: list[Any] = []
        self._last: str | None = None
        self._tokens = 0

    def ask(self, *new: Any, **fields: Any) -> Any:
        """Send new items; the response must continue the ids of the one before."""
        asked = {"model": "smollm2", "store": self._stores, "tools": [_LOOK], **_SAMPLING, **fields}
        asked["input"] = list(new) if self._stores else [*self._items, *new]
        if self._stores and self._last:
            asked["previous_response_id"] = self._last
        raw = self._client.responses.with_raw_response.create(**asked, stream=self._stream)
        response = raw.parse()
        if self._stream:
            *_, last = response
            response = last.response
        source = raw.headers["x-prompt-source"], raw.headers.get("x-prompt-reason")
        reused = int(raw.headers["x-prompt-reused"])
        assert (source, reused) == (
            (("extended", None), self._tokens) if self._tokens else (("rendered", "first_turn"), 0)
        )
        self._tokens = response.usage.total_tokens
        self._last = response.id
        self._items += [*new, *(item.to_dict() for item in response.output)]
        return response


@only_in_front
@pytest.mark.parametrize("stores", [False, True], ids=["all items", "previous_response_id"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_four_turns_are_exact(server: Served, stream: bool, stores: bool) -> None:
    session = f"responses-{stream}-{stores}-{server.url.rpartition(':')[2]}"
    talk = _Talk(server, session, stream=stream, stores=stores)
    first = talk.ask(
        {"role": "user", "content": f"Look around, {session}."},
        tool_choice="required",
        temperature=0,
        max_output_tokens=64,
    )
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls and {call.name for call in calls} == {"look"}, first.output
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "a red door"} for call in calls
    ]
    talk.ask(*results)
    for question in ("And behind it?", "Go on.", "Thanks."):
        response = talk.ask({"role": "user", "content": question})
        assert response.status in ("completed", "incomplete")
    with server.http() as http:
        turns = http.get(f"{SESSIONS}/{session}?ids=true").json()["turns"]
        samples = http.get(f"{SESSIONS}/{session}/samples").json()
    assert [turn["parent"] for turn in turns] == [None, *(turn["id"] for turn in turns[:-1])]
    assert len(samples["samples"]) == 1 and not samples["refused"]


@pytest.mark.parametrize("fields", [{"input": "Hi"}, _CODEX], ids=["text", "as Codex"])
def test_a_first_turn_has_the_prompt_of_vllms_own_route(server: Served, fields: dict[str, Any]) -> None:
    """Counted by the engine. Inside vLLM the plugin's route replaces vLLM's, so a stock engine answers."""
    asked = {"model": "smollm2", "max_output_tokens": 1, **fields}
    stock = "/v1/responses"
    with server.http() as http:
        ours = http.post(stock, json=asked)
        assert ours.status_code == 200, ours.text
        assert ours.headers["x-turn-id"] in ours.json()["id"]
    if server.url == server.engine.url:
        return
    theirs = httpx.post(f"{server.engine.url}{stock}", json=asked, timeout=120)
    assert theirs.status_code == 200, theirs.text
    assert ours.json()["usage"]["input_tokens"] == theirs.json()["usage"]["input_tokens"]


def test_a_stored_response_of_every_process(server: Served) -> None:
    """Inside vLLM two API server processes share the store."""
    client = server.client()
    made = client.responses.create(model="smollm2", input="Hi", max_output_tokens=4)
    for _ in range(6):
        assert client.responses.retrieve(made.id).output == made.output
    client.responses.delete(made.id)


def test_a_compaction(server: Served) -> None:
    items: list[Any] = [{"role": "user", "content": f"Remember: the door is red. {server.url}"}]
    with server.http() as http:
        fields = {"model": "smollm2", "max_output_tokens": 24, "store": False}
        first = http.post("/v1/responses", json={**fields, "input": items}).json()
        items += first["output"]
        compacted = http.post(
            "/v1/responses", json={**fields, "input": [*items, {"type": "compaction_trigger"}]}
        )
        assert compacted.headers["x-prompt-source"] == "extended", compacted.text
        [item] = compacted.json()["output"]
        after = http.post(
            "/v1/responses", json={**fields, "input": [item, {"role": "user", "content": "And?"}]}
        )
        assert after.status_code == 200, after.text
