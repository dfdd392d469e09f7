"""Sessions: trees of turns, what they want of their requests, rewards and samples."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from proxy.history.store import MAX_DESCRIPTION_BYTES
from proxy.samples.layouts import LAYOUTS
from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import CHAT, Message, Talk, call, result, user
from tests.support.tiny_model import END
from tests.support.utils import EVERY_SPELLING

Make = Callable[..., Talk]
SPLIT = (74, 71, 78, 78, 81, END)
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
    assert made.json().items() >= {**described, "overrides": {}, "explicit": True, "turn_count": 0}.items()
    again = client.post(_SESSIONS, json={"id": name, "overrides": {"seed": 1}})
    assert again.status_code == 200
    assert again.json().items() >= {**described, "overrides": {"seed": 1}}.items()
    assert _get(client, name).items() >= {**again.json(), "turns": [], "reward": None}.items()
    assert client.delete(f"{_SESSIONS}/{name}").json() == {"id": name, "object": "session", "deleted": True}
    for method, path in [("GET", ""), ("DELETE", ""), ("GET", "/samples")]:
        answer = client.request(method, f"{_SESSIONS}/{name}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")
    assert client.post(f"{_SESSIONS}/{name}/reward", json={"reward": 1}).status_code == 404


def test_a_session_without_a_name_gets_one(client: httpx.Client) -> None:
    one, two = (client.post(_SESSIONS).json()["id"] for _ in range(2))
    assert one != two
    assert client.post(_SESSIONS, json={}).status_code == 201
    assert _get(client, one)["explicit"] is True


@pytest.mark.parametrize("bad", ["", "a b", "a/b", "é", "a" * 201, "a\tb", "a%20b", "..", "."])
def test_names_that_are_none(client: httpx.Client, bad: str) -> None:
    made = client.post(_SESSIONS, json={"id": bad}) if bad else None
    headers = {b"x-session-id": bad.encode()}
    refused = client.post(CHAT, json={"messages": [user("Hi")]}, headers=headers)
    for answer, param in [(made, "id"), (refused, "X-Session-ID")]:
        if answer is not None:
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


_BAD: dict[str, tuple[str, str, Message, str]] = {
    "defaults that are none": ("POST", "", {"defaults": 5}, "defaults"),
    "overrides that are none": ("POST", "", {"overrides": []}, "overrides"),
    "metadata that is none": ("POST", "", {"metadata": "a"}, "metadata"),
    "a name that is none": ("POST", "", {"id": 5}, "id"),
    "messages by default": ("POST", "", {"defaults": {"messages": []}}, "defaults.messages"),
    "streams": ("POST", "", {"overrides": {"stream": True}}, "overrides.stream"),
    "stream options": ("POST", "", {"overrides": {"stream_options": {}}}, "overrides.stream_options"),
    "a limit of nothing": ("GET", "?limit=0", {}, "limit"),
    "a limit too high": ("GET", "?limit=1001", {}, "limit"),
    "an endless limit": ("GET", "?limit=inf", {}, "limit"),
    "no limit": ("GET", "?limit=nan", {}, "limit"),
    "a limit in words": ("GET", "?limit=ten", {}, "limit"),
    "a time in words": ("GET", "?before=now", {}, "before"),
    "samples shared by two": ("GET", "/{}/samples?shared=twice", {}, "shared"),
    "an unknown layout": ("GET", "/{}/samples?layout=other", {}, "layout"),
    "no reward": ("POST", "/{}/reward", {}, "reward"),
    "an empty reward": ("POST", "/{}/reward", {"reward": None}, "reward"),
    "a reward in words": ("POST", "/{}/reward", {"reward": "good"}, "reward"),
    "a reward of an unknown turn": ("POST", "/{}/reward", {"reward": 1, "turn": "x"}, "turn"),
    "rewards of unknown turns": ("POST", "/{}/reward", {"rewards": {"x": 1}}, "turn"),
    "rewards that are none": ("POST", "/{}/reward", {"rewards": [1]}, "rewards"),
    "a cursor without a time": ("GET", "?before=x:y", {}, "before"),
    "a cursor that is not a number": ("GET", "?before=nan:y", {}, "before"),
}


@pytest.mark.parametrize("method, path, body, param", _BAD.values(), ids=_BAD)
def test_bad_requests(
    client: httpx.Client, name: str, method: str, path: str, body: Message, param: str
) -> None:
    client.post(_SESSIONS, json={"id": name})
    answer = client.request(method, _SESSIONS + path.format(name), json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("by_number", [False, True])
def test_the_list_goes_page_by_page(client: httpx.Client, name: str, by_number: bool) -> None:
    names = [f"{name}-{index}" for index in range(5)]
    for one in names:
        client.post(_SESSIONS, json={"id": one})
    listed: list[str] = []
    query: dict[str, Any] = {"limit": 2}
    while len(listed) < 5:
        page = client.get(_SESSIONS, params=query).json()
        assert page["object"] == "list"
        listed += [one["id"] for one in page["data"]]
        query["before"] = repr(page["data"][-1]["used"]) if by_number else page["next"]
    assert listed[:5] == names[::-1]


def test_the_last_page_has_no_next(client: httpx.Client, name: str) -> None:
    client.post(_SESSIONS, json={"id": name})
    everything = client.get(_SESSIONS, params={"limit": 1000}).json()
    while everything["next"] is not None:  # other tests have sessions here too
        everything = client.get(_SESSIONS, params={"limit": 1000, "before": everything["next"]}).json()
    first = client.get(_SESSIONS, params={"limit": 1}).json()
    assert first["next"] == f"{first['data'][0]['used']!r}:{name}"
    oldest = everything["data"][-1]
    after = client.get(_SESSIONS, params={"before": f"{oldest['used']!r}:{oldest['id']}"}).json()
    assert (after["data"], after["next"]) == ([], None)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
@pytest.mark.parametrize("body, param", [('{"reward": %s}', "reward"), ('{"rewards": {"": %s}}', "rewards")])
def test_rewards_are_finite(client: httpx.Client, name: str, body: str, param: str, number: str) -> None:
    client.post(_SESSIONS, json={"id": name})
    answer = client.post(f"{_SESSIONS}/{name}/reward", content=body % number)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in (param, "body")  # NaN and Infinity are no JSON
    assert _get(client, name)["reward"] is None


@pytest.mark.parametrize("field", ["defaults", "overrides", "metadata"])
def test_a_description_is_bounded(client: httpx.Client, name: str, field: str) -> None:
    others = [other for other in ("defaults", "overrides", "metadata") if other != field]
    most = MAX_DESCRIPTION_BYTES - len('{"a":""}') - 2 * len('{"a":1}')
    largest = {"id": name, **{other: {"a": 1} for other in others}, field: {"a": "x" * most}}
    assert _describe(client, largest).status_code == 201
    # What a request leaves out stays, and counts
    for over in ({**largest, field: {"a": "x" * (most + 1)}}, {"id": name, others[0]: {"a": 11}}):
        refused = _describe(client, over)
        error = refused.json()["error"]
        expected = field if field in over else others[0]
        assert (refused.status_code, error["param"]) == (400, expected)
        assert f"`{expected}` is too large" in error["message"]
        assert str(MAX_DESCRIPTION_BYTES + 1) in error["message"]
    assert _get(client, name)[others[0]] == {"a": 1}
    assert _describe(client, {"id": name, field: {}}).status_code == 200


def _describe(client: httpx.Client, described: dict[str, Any]) -> httpx.Response:
    return client.post(_SESSIONS, content=json.dumps(described, separators=(",", ":")))


def test_an_unknown_session_is_named(client: httpx.Client) -> None:
    error = client.get(f"{_SESSIONS}/nobody").json()["error"]
    assert error["message"] == "unknown session 'nobody': never used, deleted, or evicted"


@EVERY_SPELLING
def test_the_tree_of_a_session(talk: Make, name: str) -> None:
    """Main agent, a sub-agent, parallel calls, compaction."""
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
    compact = talk(headers=made.headers)
    compact.messages = [user(f"Summary {name}")]
    sixth = compact.ask(reply=Reply((94, END)))
    assert (fourth.reason, sixth.reason) == ("first_turn", "first_turn")
    tree = _get(made.pair.client, name, ids="true")
    turns = tree["turns"]
    answers = [first, second, third, fourth, fifth, sixth]
    assert [turn["id"] for turn in turns] == [answered.turn for answered in answers]
    parents = [None, first.turn, first.turn, None, fourth.turn, None]
    assert [turn["parent"] for turn in turns] == parents
    assert tree["turn_count"] == 6
    root, child = turns[0], turns[1]
    assert (root["source"], root["reason"], root["reused"]) == ("rendered", "first_turn", 0)
    assert (child["source"], child["reason"], child["reused"]) == ("extended", None, len(before))
    assert child["appended"] == len(child["appended_ids"]) == int(second.prompt["appended"])
    assert root["appended_ids"] + root["completion_ids"] == before
    assert child["prompt_tokens"] == len(before) + child["appended"]
    assert (child["completion_ids"], child["logprobs"] or [-90 / 8, -END / 8]) == (
        [90, END],
        [-90 / 8, -END / 8],
    )
    assert (root["messages"], child["messages"]) == ([fork[0]], [user("more")])
    assert child["message"]["content"] == second.message["content"]
    assert (child["finish_reason"], child["model"]) == ("stop", "tiny")
    assert "completion_ids" not in _get(made.pair.client, name)["turns"][0]


def test_an_echoed_id_continues_the_rollout(talk: Make) -> None:
    made = talk()
    first = made.ask(reply=Reply(SPLIT))
    made.headers["x-session-id"] = first.session
    second = made.follow(user("more"))
    third = made.follow(user("more"))
    assert {first.session, second.session, third.session} == {first.session}
    tree = _get(made.pair.client, first.session)
    assert (tree["explicit"], tree["turn_count"]) == (False, 3)
    del made.headers["x-session-id"]
    assert made.follow(user("more")).session == first.session


def test_named_session_matches_only_its_own_turns(talk: Make, name: str) -> None:
    made = talk()
    made.ask(reply=Reply(SPLIT))
    made.headers["x-session-id"] = name
    assert made.ask(user("more")).reason == "no_match"


def test_a_deleted_session_is_not_continued(talk: Make, name: str) -> None:
    made = talk(headers={"x-session-id": name})
    made.ask(reply=Reply(SPLIT))
    made.pair.client.delete(f"{_SESSIONS}/{name}")
    assert made.ask(user("more")).reason == "no_match"
    assert _get(made.pair.client, name)["turn_count"] == 1


# --- samples and rewards


def _forked(talk: Make, name: str) -> tuple[Talk, list[str]]:
    made = talk(headers={"x-session-id": name})
    turns = [made.ask(reply=Reply(SPLIT)).turn]
    fork = list(made.messages)
    turns.append(made.ask(user("more"), reply=Reply((90, END))).turn)
    made.messages = fork
    turns.append(made.ask(user("less"), reply=Reply((91, END))).turn)
    return made, turns


@pytest.mark.parametrize("shared, trained", [("once", [2, 8]), ("each", [8, 8]), (None, [2, 8])])
def test_samples(talk: Make, name: str, shared: str | None, trained: list[int]) -> None:
    made, turns = _forked(talk, name)
    query = {"shared": shared} if shared else {}
    got = _get(made.pair.client, name, "/samples", **query)
    assert (got["id"], got["refused"]) == (name, [])
    assert [sum(sample["loss_mask"]) for sample in got["samples"]] == trained
    assert [sample["leaf"] for sample in got["samples"]] == turns[1:]
    assert got["samples"][1]["prompt_ids"] + got["samples"][1]["completion_ids"] == made.ids


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_every_layout_answers(talk: Make, name: str, layout: str) -> None:
    made, _ = _forked(talk, name)
    assert len(_get(made.pair.client, name, "/samples", layout=layout)["samples"]) == 2


def test_rewards(talk: Make, name: str) -> None:
    made, turns = _forked(talk, name)
    client, path = made.pair.client, f"{_SESSIONS}/{name}/reward"
    assert client.post(path, json={"reward": 1}).json() == {"id": name, "rewards": {"": 1.0}}
    client.post(path, json={"reward": -0.5, "turn": turns[1]})
    many = client.post(path, json={"rewards": {turns[0]: 2, turns[1]: 3.5}, "reward": 4}).json()["rewards"]
    assert many == {"": 4.0, turns[0]: 2.0, turns[1]: 3.5}
    tree = _get(client, name)
    assert (tree["reward"], [turn["reward"] for turn in tree["turns"]]) == (4.0, [2.0, 3.5, None])
    assert [sample["reward"] for sample in _get(client, name, "/samples")["samples"]] == [3.5, 4.0]
    refused = client.post(path, json={"rewards": {turns[0]: 9, "x": 1}})
    assert refused.status_code == 400
    assert _get(client, name)["turns"][0]["reward"] == 2.0


# --- what a session wants of its requests


def _make(client: httpx.Client, name: str, **described: Any) -> None:
    assert client.post(_SESSIONS, json={"id": name, **described}).status_code == 201


def test_defaults_and_overrides_reach_the_engine(client: httpx.Client, fake: FakeVllm, name: str) -> None:
    _make(client, name, defaults={"temperature": 0.5, "top_p": 0.9}, overrides={"seed": 7, "user": None})
    body = {"messages": [user("Hi")], "temperature": 0.1, "top_p": None, "seed": 1, "user": "u"}
    assert client.post(CHAT, json=body, headers={"x-session-id": name}).status_code == 200
    sent = fake.last().json
    assert (sent["temperature"], sent["top_p"], sent["seed"], sent["user"]) == (0.1, 0.9, 7, None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["defaults", "overrides"])
def test_evidence_requested_by_a_session_is_not_shown(
    client: httpx.Client, name: str, where: str, stream: bool
) -> None:
    _make(client, name, **{where: {"logprobs": True, "return_token_ids": True}})
    body = {"messages": [user("Hi")], "stream": stream}
    text = client.post(CHAT, json=body, headers={"x-session-id": name}).text
    assert '"logprob"' not in text
    assert "token_ids" not in text.replace('"token_ids":null', "").replace('"prompt_token_ids":null', "")


@pytest.mark.parametrize("where", ["defaults", "overrides"])
@pytest.mark.parametrize("stream", [False, True])
def test_evidence_disabled_by_a_session_is_still_recorded(
    talk: Make, name: str, where: str, stream: bool
) -> None:
    _make(talk().pair.client, name, **{where: {"logprobs": False, "return_token_ids": False}})
    made = talk(headers={"x-session-id": name})
    made.ask(reply=Reply(SPLIT), stream=stream)
    made.follow(user("more"), stream=stream)
    assert _get(made.pair.client, name, "/samples")["refused"] == []


def test_tools_of_a_session_are_part_of_its_conversations(talk: Make, name: str) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    _make(talk().pair.client, name, defaults={"tools": tools})
    made = talk(headers={"x-session-id": name})
    made.ask(reply=Reply((*SPLIT,), message={"tool_calls": [one := call()]}))
    assert made.pair.fake.last().json["tools"] == tools
    made.ids = [*made.rendered({"messages": made.messages[:1], "tools": tools}), *SPLIT]
    made.follow(result(one, "1"))
    made.pair.client.post(_SESSIONS, json={"id": name, "defaults": {}})
    assert made.ask(user("more")).reason == "tools_changed"


@pytest.mark.parametrize("where", ["defaults", "overrides"])
def test_a_required_prefix_is_asked_for_as_the_session_wants(talk: Make, name: str, where: str) -> None:
    """The session's fields hold for every chat request, and every turn of it is recorded."""
    _make(talk().pair.client, name, **{where: {"seed": 7}})
    made = talk(headers={"x-session-id": name})
    made.ask(reply=Reply(SPLIT))
    made.ask(user("more"), required_prefix_token_ids=made.ids)
    assert made.pair.fake.last().json["seed"] == 7


@EVERY_SPELLING
@pytest.mark.parametrize("stream", [False, True])
def test_ids_that_are_just_those_of_the_turn_before(talk: Make, name: str, stream: bool) -> None:
    """A turn that was cut off by its length goes on, on the token route."""
    made = talk(headers={"x-session-id": name})
    first = made.ask(reply=Reply(SPLIT[:-1]))
    body = {"prompt_ids": made.ids, "stream": stream}
    answer = made.pair.client.post(f"{CHAT}/tokens", json=body, headers=made.headers)
    assert answer.status_code == 200, answer.text
    last = _get(made.pair.client, name, ids="true")["turns"][-1]
    assert (last["parent"], last["appended_ids"], last["reused"]) == (first.turn, [], len(made.ids))


@pytest.mark.parametrize(
    "requested, session, recorded", [(0.5, 1.5, 1.5), (0.5, None, 0.5), (None, None, None)]
)
def test_the_temperature_of_a_turn_is_recorded(
    client: httpx.Client, requested: float | None, session: float | None, recorded: float | None
) -> None:
    overrides = {} if session is None else {"temperature": session}
    name = client.post("/v1/sessions", json={"overrides": overrides}).json()["id"]
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": requested}
    client.post("/v1/chat/completions", json=body, headers={"x-session-id": name})
    [sample] = client.get(f"/v1/sessions/{name}/samples").json()["samples"]
    assert sample["turns"][0]["temperature"] == recorded
