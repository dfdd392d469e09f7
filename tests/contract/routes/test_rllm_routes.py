"""What rLLM reads of sessions: the traces of their turns, and its name for their id."""

from collections.abc import Callable
from typing import Any

import httpx

from tests.support.fake_vllm import Reply
from tests.support.talk import Talk, user
from tests.support.tiny_model import END

Make = Callable[..., Talk]
_SPLIT = (74, 71, 78, 78, 81, END)
_SESSIONS = "/v1/sessions"


def test_traces_hold_whole_prompts(talk: Make, name: str) -> None:
    """As rLLM's trainers read them: one record for each turn, branches included."""
    made = talk(headers={"x-session-id": name})
    made.ask(reply=Reply(_SPLIT))
    first = list(made.messages)
    made.follow(user("more"))
    whole = list(made.messages)
    made.messages = first
    made.ask(user("something else"))
    answer = made.pair.client.get(f"/sessions/{name}/traces")
    assert answer.status_code == 200
    one, two, branch = answer.json()
    assert {trace["session_id"] for trace in (one, two, branch)} == {name}
    before = one["prompt_token_ids"] + one["completion_token_ids"]
    assert one["completion_token_ids"] == list(_SPLIT)
    for trace in (two, branch):
        assert trace["prompt_token_ids"][: len(before)] == before
        assert trace["metadata"] == {"parent": one["trace_id"], "problem": None}
    assert [*two["messages"], two["response_message"]] == whole
    assert two["token_counts"]["prompt"] == len(two["prompt_token_ids"])
    assert len(two["logprobs"]) == len(two["completion_token_ids"]) == two["token_counts"]["completion"]
    assert two["finish_reason"] == "stop"

    def read(**query: Any) -> list[str]:
        found = made.pair.client.get(f"{_SESSIONS}/{name}/traces", params=query).json()
        return [trace["trace_id"] for trace in found]

    assert read(limit=1) == [one["trace_id"]]
    assert read(since=branch["timestamp"]) == [branch["trace_id"]]
    assert made.pair.client.get(f"{_SESSIONS}/{name}/traces?limit=0").json()["error"]["param"] == "limit"
    assert made.pair.client.get(f"{_SESSIONS}/nobody/traces").status_code == 404


def test_a_session_with_rllms_name_for_its_id(client: httpx.Client, name: str) -> None:
    made = client.post("/sessions", json={"session_id": name}).json()
    read = client.get(f"{_SESSIONS}/{name}").json()
    assert (made["id"], made["session_id"], read["session_id"]) == (name, name, name)
    assert client.post("/sessions", json={"session_id": 5}).json()["error"]["param"] == "session_id"
