"""Stored responses: continued, read, listed, deleted, and found by their own tenant only."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.contract.formats.responses.dialogue import FUNCTION, engine_body, result, sdk
from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import call, user
from tests.support.tiny_model import SPLIT
from tests.support.utils import run_proxy
from tokenproxy.record.store import StoreError
from tokenproxy.store.sqlite import SqliteStore

_CALLING = Reply(
    SPLIT, message={"content": "I look", "reasoning": "so", "tool_calls": [call("f", "{}", "c1")]}
)


def _post(client: httpx.Client, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return client.post("/v1/responses", json={"model": "tiny", **fields}, headers=headers)


def test_the_life_of_a_response(client: httpx.Client, fake: FakeVllm) -> None:
    asking = sdk(client)
    fake.replies.append(_CALLING)
    fields = {"tools": [FUNCTION], "metadata": {"a": "b"}, "instructions": "Be brief."}
    first = asking.responses.create(model="tiny", input="Hi", **fields)
    assert asking.responses.retrieve(first.id).to_dict() == first.to_dict()
    assert (first.metadata, first.instructions) == ({"a": "b"}, "Be brief.")
    new = [result(first.output[-1], "ok"), user("And?")]
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
    made = _post(client, input="Hi", store=False).json()
    assert client.get(f"/v1/responses/{made['id']}").status_code == 404
    assert _post(client, input="more", previous_response_id=made["id"]).status_code == 400


def test_responses_of_other_tenants_are_not_found(mortal: FakeVllm) -> None:
    with run_proxy([mortal], store="memory:", api_key=["one", "two"]) as client:
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        made = _post(client, one, input="Hi").json()
        path = f"/v1/responses/{made['id']}"
        for method in ("GET", "DELETE"):
            assert client.request(method, path, headers=two).json()["error"]["code"] == "response_not_found"
        for param, fields in (
            ("previous_response_id", {"input": "more", "previous_response_id": made["id"]}),
            ("input[0].id", {"input": [{"type": "item_reference", "id": made["output"][0]["id"]}]}),
        ):
            assert _post(client, two, **fields).json()["error"]["param"] == param
        assert client.get(path, headers=one).status_code == 200


def test_references_to_items(client: httpx.Client, fake: FakeVllm) -> None:
    fake.replies.append(_CALLING)
    made = _post(client, input="Hi", tools=[FUNCTION]).json()
    references = [{"type": "item_reference", "id": item["id"]} for item in made["output"]]
    answer = {"type": "function_call_output", "call_id": "c1", "output": "ok"}
    items = [user("Hi"), *references[:2], {"id": references[2]["id"]}, answer]
    _post(client, input=items, tools=[FUNCTION])
    assistant = engine_body(fake)["messages"][1]
    assert (assistant["reasoning"], assistant["content"]) == ("so", "I look")
    assert assistant["tool_calls"][0]["id"] == "c1"
    unknown = {"type": "item_reference", "id": f"msg_{'0' * 36}"}
    assert _post(client, input=[unknown]).json()["error"]["param"] == "input[0].id"


def test_a_store_that_does_not_respond(mortal: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*args: object, **named: object) -> None:
        raise StoreError("out of order")

    for name in ("put", "get"):
        monkeypatch.setattr(SqliteStore, name, fail)
    with run_proxy([mortal], store="memory:") as client:
        made = _post(client, input="Hi").json()
        assert made["status"] == "completed"
        # a summary that cannot be kept is not sent: the client keeps its conversation
        assert _post(client, input=[user("Hi"), {"type": "compaction_trigger"}]).status_code == 503
        # what waits is read here; another may be in the store
        assert _post(client, input="more", previous_response_id=made["id"]).status_code == 200
        assert client.get(f"/v1/responses/{made['id']}").json() == made
        assert client.get("/v1/responses/resp_0").status_code in (404, 503)


def test_a_damaged_response_counts_as_one_that_is_not_stored(mortal: FakeVllm, tmp_path: Path) -> None:
    file = tmp_path / "x.db"
    with run_proxy([mortal], store=f"sqlite://{file}") as client:
        for content in (b"z\xff", b"={", b"=\xff", b""):
            made, other = _post(client, input="Hi").json(), _post(client, input="Hi").json()
            with closing(sqlite3.connect(file)) as connection, connection:
                connection.execute("UPDATE kept SET value = ? WHERE name = ?", (content, made["id"]))
            path = f"/v1/responses/{made['id']}"
            assert client.get(path).json()["error"]["code"] == "response_not_found"
            refused = _post(client, input="more", previous_response_id=made["id"])
            assert refused.json()["error"]["code"] == "previous_response_not_found"
            assert f"documents {made['id']}" in client.get("/ready").json()["store"]["unreadable_records"]
            assert client.delete(path).json()["deleted"]
            assert _post(client, input="more", previous_response_id=other["id"]).status_code == 200
