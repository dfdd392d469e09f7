"""Conversations over `/v1/responses` stay exact, whichever way a client continues them."""

from typing import Any

import pytest

from tests.contract.formats.responses.dialogue import FUNCTION, Dialogue, engine_body, result
from tests.support.fake_vllm import Reply, as_rendered, tools_as_rendered
from tests.support.talk import call, user
from tests.support.tiny_model import END, SPLIT, TinyModel
from tests.support.utils import EVERY_SPELLING, Pair


def _calling(*calls: str, **message: Any) -> Reply:
    made = [call("f", '{ "a" :1}', name) for name in calls]
    return Reply(SPLIT, message={"content": None, "tool_calls": made, **message}, finish="tool_calls")


@EVERY_SPELLING
@pytest.mark.parametrize("stores", [False, True], ids=["all items", "previous_response_id"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_four_turns_with_reasoning_and_calls(
    pair: Pair, tiny_model: TinyModel, stores: bool, stream: bool
) -> None:
    fields = {"tools": [FUNCTION], "instructions": "Be brief.", "include": ["reasoning.encrypted_content"]}
    made = Dialogue(pair, tiny_model, fields, stores)
    reply = _calling("c1", "c2", reasoning="so", content="I look")
    first = made.ask([user(f"Hi {stores} {stream}")], reply, stream=stream)
    calls = [item for item in first.output if item.type == "function_call"]
    made.ids = [*_rendered(made), *SPLIT]
    new = [result(calls[0], "one"), result(calls[1], "two")]
    said = [
        {"role": "tool", "tool_call_id": f"c{n}", "content": text} for n, text in ((1, "one"), (2, "two"))
    ]
    second = made.follow(new, said, _calling("c3", reasoning="then"), stream=stream)
    [again] = [item for item in second.output if item.type == "function_call"]
    said = [{"role": "tool", "tool_call_id": "c3", "content": "3"}]
    made.follow([result(again, "3")], said, Reply(SPLIT, message={"reasoning": "at last"}), stream=stream)
    made.follow([user("Thanks")], [user("Thanks")], Reply((*SPLIT[:3],)), stream=stream)


def _rendered(made: Dialogue) -> list[int]:
    """The prompt of a first turn, as the engine rendered it."""
    body = engine_body(made.pair.fake)
    return made.model.render(as_rendered(body["messages"]), tools=tools_as_rendered(body.get("tools")))


_CLIENTS: dict[str, dict[str, Any]] = {
    "reasoning as a summary": {"fields": {"reasoning": {"summary": "auto"}}},
    "without ids": {"strip_ids": True},
}


@pytest.mark.parametrize("client", _CLIENTS.values(), ids=_CLIENTS)
def test_what_clients_send_back(pair: Pair, tiny_model: TinyModel, client: dict[str, Any]) -> None:
    fields = {"tools": [FUNCTION], **client.get("fields", {})}
    made = Dialogue(pair, tiny_model, **{**client, "fields": fields})
    first = made.ask([user(f"Hi {client}")], _calling("c1", reasoning="so", content=" a "))
    made.ids = [*_rendered(made), *SPLIT]
    said = [{"role": "tool", "tool_call_id": "c1", "content": "1"}]
    made.follow([result(first.output[-1], "1")], said, Reply(SPLIT, message={"reasoning": "r"}))
    made.follow([user("more")], [user("more")], Reply(SPLIT))


def test_the_echoed_item_decides_between_equal_texts(pair: Pair, tiny_model: TinyModel) -> None:
    """Two conversations got equal texts and other ids: each continues its own."""
    talks = [Dialogue(pair, tiny_model) for _ in range(2)]
    for number, made in enumerate(talks):
        sampled = (*SPLIT[:-1], 90 + number, END)
        made.ask([user("Hi, twice the same")], Reply(sampled, message={"content": "same"}))
        made.ids = [*_rendered(made), *sampled]
    for made in reversed(talks):
        made.follow([user("more")], [user("more")], Reply(SPLIT))
