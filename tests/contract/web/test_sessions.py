"""Sessions: trees of turns, what they want of their requests, rewards and samples."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import CHAT, Message, Talk, user
from tests.support.tiny_model import END, SPLIT
from tests.support.utils import EVERY_SPELLING
from tokenproxy.record.store import MAX_DESCRIPTION_BYTES, Session
from tokenproxy.store.guarded import GuardedStore

Make = Callable[..., Talk]
_SESSIONS = "/v1/sessions"


def _get(client: httpx.Client, name: str, what: str = "", **query: str) -> dict[str, Any]:
    answer = client.get(f"{_SESSIONS}/{name}{what}", params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_make_describe_and_delete(client: httpx.Client, name: str) -> None:
    described = {"id": name, "defaults": {"temperature": 0.5}, "metadata": {"task": [1, {"a": None}]}}
    made = client.post(_SESSIONS, json=described)
    assert made.status_code == 201
    again = client.post(_SESSIONS, json={"id": name, "overrides": {"seed": 1}})
    assert again.status_code == 200
    assert again.json().items() >= {**described, "overrides": {"seed": 1}}.items()
    assert _get(client, name).items() >= {**again.json(), "turns": [], "reward": None}.items()
    assert client.delete(f"{_SESSIONS}/{name}").json() == {"id": name, "object": "session", "deleted": True}
    for method, path in [("GET", ""), ("DELETE", ""), ("GET", "/samples")]:
        answer = client.request(method, f"{_SESSIONS}/{name}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")


def test_concurrent_requests_keep_the_fields_of_each_other(
    client: httpx.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them read the session before one writes."""
    described = {"limits": {"turns": 3}, "policy": {"top_p": 0.5}, "metadata": {"x": 1}, "defaults": {"n": 2}}
    have_read, read = asyncio.Barrier(len(described)), GuardedStore.session

    async def read_together(store: GuardedStore, rollout: str) -> Session | None:
        found = await read(store, rollout)
        await have_read.wait()
        return found

    with monkeypatch.context() as patch, ThreadPoolExecutor(len(described)) as threads:
        patch.setattr(GuardedStore, "session", read_together)
        bodies = [{"id": name, field: value} for field, value in described.items()]
        made = list(threads.map(lambda body: client.post(_SESSIONS, json=body), bodies))
    assert [each.status_code for each in made] == [201] * len(described)
    assert _get(client, name).items() >= described.items()


def test_a_name_that_must_be_new(client: httpx.Client, name: str) -> None:
    """Whether it was described, or only used by a turn. By default a session is continued."""
    client.post(CHAT, json={"messages": [user("Hi")]}, headers={"x-session-id": f"{name}-used"})
    assert (
        client.post(_SESSIONS, json={"id": name, "exists": "error", "metadata": {"a": 1}}).status_code == 201
    )
    for taken in (name, f"{name}-used"):
        refused = client.post(_SESSIONS, json={"session_id": taken, "exists": "error", "metadata": {"a": 2}})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (409, "session_exists", "session_id")
        assert taken in error["message"]
    assert _get(client, name)["metadata"] == {"a": 1}
    for exists in ("continue", None):
        assert client.post(_SESSIONS, json={"id": name, "exists": exists}).status_code == 200
    client.delete(f"{_SESSIONS}/{name}")
    # what a request with an error claimed is free at once
    wrong = {"id": name, "exists": "error", "metadata": {"a": "x" * MAX_DESCRIPTION_BYTES}}
    assert client.post(_SESSIONS, json=wrong).status_code == 400
    assert client.post(_SESSIONS, json={"id": name, "exists": "error"}).status_code == 201


def test_of_requests_that_create_a_session_at_once_one_succeeds(
    client: httpx.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has read that there is no such session, and waits until the second was answered."""
    has_read, answered, read = threading.Event(), asyncio.Event(), GuardedStore.session
    loops: list[asyncio.AbstractEventLoop] = []

    async def read_and_wait(store: GuardedStore, rollout: str) -> Session | None:
        found = await read(store, rollout)
        if not loops:
            loops.append(asyncio.get_running_loop())
            has_read.set()
            await answered.wait()
        return found

    def create() -> int:
        return client.post(_SESSIONS, json={"id": name, "exists": "error"}).status_code

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as threads:
        patch.setattr(GuardedStore, "session", read_and_wait)
        first = threads.submit(create)
        assert has_read.wait(10)
        second = create()
        loops[0].call_soon_threadsafe(answered.set)
        assert (first.result(10), second) == (201, 409)
    assert create() == 409


def test_a_session_of_rllm(client: httpx.Client, fake: FakeVllm, name: str) -> None:
    """Its names hold slashes, and its `sampling_params` are defaults of the requests."""
    made = client.post("/sessions", json={"session_id": f"org/{name}:0", "sampling_params": {"seed": 7}})
    assert made.status_code == 201
    base = f"/sessions/org/{name}:0"
    for fields, seed in (({}, 7), ({"seed": 8}, 8)):
        answer = client.post(f"{base}/v1/chat/completions", json={"messages": [user("Hi")], **fields})
        assert (answer.headers["x-session-id"], fake.last().json["seed"]) == (f"org=2F{name}:0", seed)
    assert [trace["session_id"] for trace in client.get(f"{base}/traces").json()] == [f"org=2F{name}:0"] * 2


def test_what_a_probe_asks_is_not_recorded(client: httpx.Client, name: str) -> None:
    """OpenEnv asks each engine three questions before its rollouts."""
    headers = {"x-session-id": name, "user-agent": "OpenEnv-provider-probe/1.0"}
    for path, body in ((CHAT, {"messages": [user("Hi")]}), ("/v1/completions", {"prompt": [1, 74]})):
        assert client.post(path, json={**body, "return_token_ids": True}, headers=headers).status_code == 200
    assert client.get(f"{_SESSIONS}/{name}").status_code == 404
    headers["user-agent"] = "openai-python/3.1 space-probe/2"  # a program that only holds the word
    assert client.post(CHAT, json={"messages": [user("Hi")]}, headers=headers).status_code == 200
    assert len(client.get(f"{_SESSIONS}/{name}").json()["turns"]) == 1


@pytest.mark.parametrize("bad", ["a b", "é", "a" * 201, ".."])
def test_names_that_are_none(client: httpx.Client, bad: str) -> None:
    made = client.post(_SESSIONS, json={"id": bad})
    assert (made.status_code, made.json()["error"]["param"]) == (400, "id")
    headers = {b"x-session-id": bad.encode()}
    refused = client.post(CHAT, json={"messages": [user("Hi")]}, headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Session-ID")


_BAD: list[tuple[str, str, Message, str]] = [
    ("POST", "", {"defaults": 5}, "defaults"),
    ("POST", "", {"session_id": 5}, "session_id"),
    ("POST", "", {"exists": "fail"}, "exists"),
    ("POST", "", {"exists": True}, "exists"),
    ("POST", "", {"defaults": {}, "sampling_params": {}}, "sampling_params"),
    ("POST", "", {"overrides": {"stream": True}}, "overrides.stream"),
    ("GET", "?limit=0", {}, "limit"),
    ("GET", "?before=x:y", {}, "before"),
    ("GET", "/{}/samples?shared=twice", {}, "shared"),
    ("GET", "/{}/samples?layout=other", {}, "layout"),
    ("POST", "/{}/reward", {"reward": "good"}, "reward"),
    ("POST", "/{}/reward", {"rewards": {"x": 1}}, "turn"),
    ("GET", "/{}/traces?limit=0", {}, "limit"),
    ("GET", "/{}?limit=0", {}, "limit"),
    ("GET", "/{}?after=unknown", {}, "after"),
    ("GET", "/{}?limit=1.9", {}, "limit"),
    ("GET", "/{}?limit=1&limit=2", {}, "limit"),
    ("GET", "/{}?ids=True", {}, "ids"),
    ("GET", "/{}?id=true", {}, "id"),
    ("GET", "?limit=1.5", {}, "limit"),
    ("GET", "?limits=1", {}, "limits"),
    ("GET", "/{}/samples?clas=main", {}, "clas"),
]


def test_bad_requests(client: httpx.Client, name: str) -> None:
    client.post(_SESSIONS, json={"id": name})
    for method, path, body, param in _BAD:
        answer = client.request(method, _SESSIONS + path.format(name), json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (path, body)
    infinite = client.post(f"{_SESSIONS}/{name}/reward", content=b'{"rewards": {"": 1e999}}')
    assert infinite.status_code == 400 and _get(client, name)["reward"] is None


def test_the_list_goes_page_by_page(client: httpx.Client, name: str) -> None:
    names = [f"{name}-{index}" for index in range(5)]
    for each in names:
        client.post(_SESSIONS, json={"id": each})
    listed: list[str] = []
    query: dict[str, Any] = {"limit": 2}
    while len(listed) < 5:
        page = client.get(_SESSIONS, params=query).json()
        listed += [each["id"] for each in page["data"]]
        query["before"] = page["next"]
    assert listed[:5] == names[::-1]


def test_a_description_is_bounded(client: httpx.Client, name: str) -> None:
    most = MAX_DESCRIPTION_BYTES - len('{"a":""}') - 2 * len('{"a":1}') - len("{}{}")
    largest = {"defaults": {"a": 1}, "overrides": {"a": 1}, "metadata": {"a": "x" * most}}
    assert client.post(_SESSIONS, json={"id": name, **largest}).status_code == 201
    # what a request leaves out stays, and counts
    refused = client.post(_SESSIONS, json={"id": name, "defaults": {"a": 11}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "defaults")
    assert str(MAX_DESCRIPTION_BYTES + 1) in refused.json()["error"]["message"]
    assert _get(client, name)["defaults"] == {"a": 1}


@EVERY_SPELLING
def test_the_tree_of_a_session(talk: Make, name: str) -> None:
    """A main agent with a fork, and a sub-agent."""
    made = talk(headers={"x-session-id": name})
    first = made.ask(reply=Reply(SPLIT))
    assert first.session == name
    fork, before = list(made.messages), made.ids
    second = made.follow(user("more"), reply=Reply((90, END)))
    made.messages = fork
    third = made.follow(user("less"), reply=Reply((91, END)), expected=before)
    sub = talk(headers=made.headers)
    sub.messages = [{"role": "system", "content": "You search"}, *sub.messages]
    fourth = sub.ask(reply=Reply((92, END)))
    fifth = sub.follow(user("more"), reply=Reply((93, END)))
    assert fourth.reason == "first_turn"
    turns = _get(made.pair.client, name, ids="true")["turns"]
    assert [turn["id"] for turn in turns] == [each.turn for each in (first, second, third, fourth, fifth)]
    start = _get(made.pair.client, name, ids="true", limit="3")
    rest = _get(made.pair.client, name, ids="true", limit="3", after=start["next"])
    assert (start["turns"], rest["turns"], rest["next"]) == (turns[:3], turns[3:], None)
    assert [turn["parent"] for turn in turns] == [None, first.turn, first.turn, None, fourth.turn]
    root, child = turns[0], turns[1]
    assert (root["source"], root["reason"], root["reused"]) == ("rendered", "first_turn", 0)
    assert (child["source"], child["reason"], child["reused"]) == ("extended", None, len(before))
    assert child["appended"] == len(child["appended_ids"]) == int(second.prompt["appended"])
    assert child["prompt_tokens"] == len(before) + child["appended"]
    assert (root["appended_ids"] + root["completion_ids"], child["completion_ids"]) == (before, [90, END])
    assert (root["messages"], child["messages"]) == ([fork[0]], [user("more")])
    assert "completion_ids" not in _get(made.pair.client, name)["turns"][0]


def test_an_echoed_id_continues_the_rollout(talk: Make) -> None:
    made = talk()
    first = made.ask(reply=Reply(SPLIT))
    made.headers["x-session-id"] = first.session
    second = made.follow(user("more"))
    del made.headers["x-session-id"]
    third = made.follow(user("more"))
    assert {first.session, second.session, third.session} == {first.session}
    tree = _get(made.pair.client, first.session)
    assert (tree["explicit"], tree["turn_count"]) == (False, 3)


def test_a_named_session_matches_only_its_own_turns_until_it_is_deleted(talk: Make, name: str) -> None:
    made = talk()
    made.ask(reply=Reply(SPLIT))
    made.headers["x-session-id"] = name
    assert made.ask(user("more")).reason == "no_match"
    made.pair.client.delete(f"{_SESSIONS}/{name}")
    assert made.ask(user("more")).reason == "no_match"
    assert _get(made.pair.client, name)["turn_count"] == 1


def _make(client: httpx.Client, name: str, **described: Any) -> None:
    assert client.post(_SESSIONS, json={"id": name, **described}).status_code == 201


def test_defaults_and_overrides_reach_the_engine(client: httpx.Client, fake: FakeVllm, name: str) -> None:
    _make(client, name, defaults={"temperature": 0.5, "top_p": 0.9}, overrides={"seed": 7, "user": None})
    body = {"messages": [user("Hi")], "temperature": 0.1, "top_p": None, "seed": 1, "user": "u"}
    assert client.post(CHAT, json=body, headers={"x-session-id": name}).status_code == 200
    sent = fake.last().json
    assert (sent["temperature"], sent["top_p"], sent["seed"], sent["user"]) == (0.1, 0.9, 7, None)
    assert _get(client, name, "/samples")["samples"][0]["turns"][0]["temperature"] == 0.1


def test_evidence_disabled_by_a_session_is_still_recorded(talk: Make, name: str) -> None:
    """The session's fields hold for requests with a required prefix too."""
    _make(talk().pair.client, name, overrides={"logprobs": False, "return_token_ids": False, "seed": 7})
    made = talk(headers={"x-session-id": name})
    made.ask(reply=Reply(SPLIT))
    made.follow(user("more"), stream=True)
    made.ask(user("more"), required_prefix_token_ids=made.ids)
    assert made.pair.fake.last().json["seed"] == 7
    assert _get(made.pair.client, name, "/samples")["refused"] == []


def test_traces_hold_whole_prompts(talk: Make, name: str) -> None:
    """As rLLM's trainers read them: one record for each turn, branches included."""
    made = talk(headers={"x-session-id": name})
    made.ask(reply=Reply(SPLIT))
    first = list(made.messages)
    made.follow(user("more"))
    whole = list(made.messages)
    made.messages = first
    made.ask(user("something else"))
    assert made.pair.client.post("/admin/flush").json() == {"status": "flushed"}
    one, two, branch = made.pair.client.get(f"/sessions/{name}/traces").json()
    before = one["prompt_token_ids"] + one["completion_token_ids"]
    assert one["completion_token_ids"] == list(SPLIT)
    for trace in (two, branch):
        assert trace["prompt_token_ids"][: len(before)] == before
        assert trace["metadata"] == {"parent": one["trace_id"], "problem": None}
    assert [*two["messages"], two["response_message"]] == whole
    assert len(two["logprobs"]) == len(two["completion_token_ids"]) == two["token_counts"]["completion"]
    for query, found in (({"limit": 1}, one), ({"since": branch["timestamp"]}, branch)):
        [trace] = made.pair.client.get(f"{_SESSIONS}/{name}/traces", params=query).json()
        assert trace["trace_id"] == found["trace_id"]
