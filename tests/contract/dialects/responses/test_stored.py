"""Stored responses: continued, read, listed, deleted, and found by their own tenant only."""

from typing import Any

import httpx
import openai
import pytest

from proxy.history.store import StoreError
from proxy.stores.memory_documents import MemoryDocuments
from tests.contract.dialects.responses.dialogue import FUNCTION, engine_body, result, sdk
from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import call
from tests.support.tiny_model import SPLIT
from tests.support.utils import run_proxy

_CALLING = Reply(
    SPLIT, message={"content": "I look", "reasoning": "so", "tool_calls": [call("f", "{}", "c1")]}
)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/responses", json={"model": "tiny", **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def _error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_the_life_of_a_response(client: httpx.Client, fake: FakeVllm) -> None:
    asking = sdk(client)
    fake.replies.append(_CALLING)
    fields = {"tools": [FUNCTION], "metadata": {"a": "b"}, "instructions": "Be brief."}
    first = asking.responses.create(model="tiny", input="Hi", **fields)
    assert asking.responses.retrieve(first.id).to_dict() == first.to_dict()
    assert (first.metadata, first.instructions) == ({"a": "b"}, "Be brief.")
    new = [result(first.output[-1], "ok"), _user("And?")]
    second = asking.responses.create(model="tiny", previous_response_id=first.id, input=new)
    roles = [message["role"] for message in engine_body(fake)["messages"]]
    assert roles == ["user", "assistant", "tool", "user"]
    asking.responses.delete(first.id)
    for gone in (asking.responses.retrieve, asking.responses.delete):
        with pytest.raises(openai.NotFoundError) as error:
            gone(first.id)
        assert error.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        asking.responses.create(model="tiny", previous_response_id=second.id, input="more")
    assert refused.value.param == "previous_response_id"
    assert refused.value.code == "previous_response_not_found"


def test_a_response_that_is_not_stored(client: httpx.Client) -> None:
    asking = sdk(client)
    response = asking.responses.create(model="tiny", input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        asking.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError):
        asking.responses.create(model="tiny", previous_response_id=response.id, input="more")


def test_responses_of_other_tenants_are_not_found(mortal: FakeVllm) -> None:
    with run_proxy([mortal], store="memory:", api_key=["one", "two"]) as client:
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        made = client.post("/v1/responses", json={"model": "tiny", "input": "Hi"}, headers=one).json()
        path = f"/v1/responses/{made['id']}"
        for method in ("GET", "DELETE"):
            assert _error(client.request(method, path, headers=two), 404)["code"] == "response_not_found"
        for param, fields in (
            ("previous_response_id", {"input": "more", "previous_response_id": made["id"]}),
            ("input[0].id", {"input": [{"type": "item_reference", "id": made["output"][0]["id"]}]}),
        ):
            refused = client.post("/v1/responses", json={"model": "tiny", **fields}, headers=two)
            assert _error(refused, 400)["param"] == param
        assert client.get(path, headers=one).status_code == 200


def test_references_to_items(client: httpx.Client, fake: FakeVllm) -> None:
    fake.replies.append(_CALLING)
    made = _answer(client, input="Hi", tools=[FUNCTION])
    references = [{"type": "item_reference", "id": item["id"]} for item in made["output"]]
    answer = {"type": "function_call_output", "call_id": "c1", "output": "ok"}
    items = [_user("Hi"), *references[:2], {"id": references[2]["id"]}, answer]
    _answer(client, input=items, tools=[FUNCTION])
    assistant = engine_body(fake)["messages"][1]
    assert (assistant["reasoning"], assistant["content"]) == ("so", "I look")
    assert assistant["tool_calls"][0]["id"] == "c1"
    unknown = {"type": "item_reference", "id": f"msg_{'0' * 36}"}
    more = client.post("/v1/responses", json={"model": "tiny", "input": [unknown]})
    assert _error(more, 400)["param"] == "input[0].id"


def test_a_store_that_does_not_respond(mortal: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*args: object) -> None:
        raise StoreError("out of order")

    with run_proxy([mortal], store="memory:") as client:
        made = _answer(client, input="Hi")
        monkeypatch.setattr(MemoryDocuments, "keep", fail)
        monkeypatch.setattr(MemoryDocuments, "read", fail)
        unstored = _answer(client, input="Hi")
        assert unstored["status"] == "completed"
        more = {"model": "tiny", "input": "more", "previous_response_id": made["id"]}
        assert _error(client.post("/v1/responses", json=more), 503)
        assert _error(client.get(f"/v1/responses/{made['id']}"), 503)
