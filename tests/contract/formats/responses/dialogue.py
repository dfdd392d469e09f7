"""A client of `/v1/responses` with OpenAI's SDK, and what the engine got."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
from openai.types.responses import Response

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import CHAT, appended_after, sent_ids
from tests.support.tiny_model import TinyModel
from tests.support.utils import Pair

Item = dict[str, Any]
Event = dict[str, Any]
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION: Item = {"type": "function", "name": "f", "parameters": _SCHEMA, "strict": False}


def sdk(client: httpx.Client) -> Any:
    """OpenAI's SDK for a proxy, untyped: items are plain objects here. It repeats nothing."""
    return openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)


def engine_body(fake: FakeVllm) -> Any:
    """The last chat completion that the engine got."""
    return fake.generations(CHAT)[-1].json


def events_of(body: bytes) -> list[Event]:
    """The events of a stream, whose names are checked."""
    events: list[Event] = []
    for block in body.split(b"\n\n"):
        lines = [line for line in block.split(b"\n") if line and not line.startswith(b":")]
        if lines:
            name, data = lines
            event = json.loads(data.removeprefix(b"data: "))
            assert name == b"event: " + event["type"].encode()
            events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def result(call: Any, output: Any) -> Item:
    """The result of a function call."""
    return {"type": "function_call_output", "call_id": call.call_id, "output": output}


@dataclass
class Dialogue:
    """A conversation with all its items, as a client holds it."""

    pair: Pair
    model: TinyModel
    fields: dict[str, Any] = field(default_factory=dict)
    stores: bool = False
    """Whether it names the previous response in place of sending all items."""
    items: list[Item] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    """Prompt and completion of the last turn, as the engine consumed and sampled them."""
    last: str | None = None
    strip_ids: bool = False
    """Whether it drops the ids of items, as some clients do."""

    def ask(self, new: Sequence[Item], reply: Reply, *, stream: bool = False) -> Response:
        """Send new items; keeps what comes back."""
        self.pair.fake.replies.append(reply)
        client = sdk(self.pair.client)
        request: dict[str, Any] = {"model": "tiny", "store": self.stores, **self.fields}
        if self.stores:
            request |= {"input": new, "previous_response_id": self.last or openai.omit}
        else:
            request["input"] = [*self.items, *new]
        if stream:
            with client.responses.stream(**request) as events:
                response: Response = events.get_final_response()
        else:
            response = client.responses.create(**request)
        self.last = response.id
        kept: list[Item] = [item.to_dict() for item in response.output]
        self.items += [*new, *({**item, "id": None} if self.strip_ids else item for item in kept)]
        self.ids = [*(sent_ids(self.pair.fake) or []), *reply.ids]
        return response

    def follow(
        self, new: Sequence[Item], said: Sequence[dict[str, Any]], reply: Reply, *, stream: bool = False
    ) -> Response:
        """Send new items, which must continue the ids of the last turn.

        Args:
            said: the items as chat messages.
        """
        before, tools = self.ids, engine_body(self.pair.fake).get("tools")
        response = self.ask(new, reply, stream=stream)
        expected = [*before, *appended_after(self.model, before, said, tools=tools)]
        assert sent_ids(self.pair.fake) == expected
        return response
