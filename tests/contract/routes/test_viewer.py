"""`/viewer`: the page, who gets it, and what it reads."""

import json
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.key_command import add_key
from proxy.viewer.files import FOLDER
from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import CHAT, user
from tests.support.tiny_model import END, TinyModel
from tests.support.utils import run_proxy

_POLICY = "default-src 'self'"
SPLIT = (74, 71, 78, 78, 81, END)
"""Ids that the tokenizer would merge, had it encoded their text."""

Keyed = tuple[httpx.Client, dict[str, str]]
"""A client of a proxy with keys, and keys by their scope; `other` is another tenant's."""


@pytest.fixture(scope="module")
def keys(engine: FakeVllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    file: Path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    made = {
        "inference": add_key(file, "a", ["inference"], None),
        "read": add_key(file, "b", ["read"], "a"),
        "other": add_key(file, "c", ["read", "inference"], None),
    }
    with run_proxy([engine], reader=made["read"], api_key_file=file, store="memory:") as client:
        yield client, made


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _talk(client: httpx.Client, engine: FakeVllm, name: str, **headers: str) -> None:
    """Two turns in a session; the first samples ids that no tokenizer would make of its text."""
    session = {"x-session-id": name, **headers}
    engine.replies.append(Reply(SPLIT))
    messages = [user("Hi")]
    first = client.post(CHAT, json={"messages": messages}, headers=session).json()
    messages += [first["choices"][0]["message"], user("And?")]
    assert client.post(CHAT, json={"messages": messages}, headers=session).status_code == 200


def _tokens(client: httpx.Client, name: str, turn: str) -> dict[str, Any]:
    """The body of ids, read as the page reads it."""
    body = client.get(f"/viewer/sessions/{name}/tokens", params={"turn": turn}).content
    [size] = struct.unpack_from("<I", body)
    header: dict[str, Any] = json.loads(body[4 : 4 + size])
    ids, logprobs = array("i"), array("f")
    start, count = 4 + size, header["count"]
    assert start % 4 == 0 and len(body) == start + 9 * count
    ids.frombytes(body[start : start + 4 * count])
    logprobs.frombytes(body[start + 4 * count : start + 8 * count])
    return header | {
        "ids": ids.tolist(),
        "logprobs": logprobs.tolist(),
        "flags": [*body[start + 8 * count :]],
    }


def test_the_page_loads_only_from_its_origin(client: httpx.Client) -> None:
    page = client.get("/viewer")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith(_POLICY)
    assert page.headers["x-content-type-options"] == "nosniff"
    for part in ("<script>", "style=", "http://", "https://", "onload", "onclick"):
        assert part not in page.text


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.iterdir()))
def test_every_file_is_served_with_its_type(client: httpx.Client, file: str) -> None:
    answer = client.get(f"/viewer/static/{file}")
    kinds = {"js": "text/javascript", "css": "text/css", "html": "text/html", "svg": "image/svg+xml"}
    assert answer.status_code == 200
    assert answer.headers["content-type"].split(";")[0] == kinds[file.rpartition(".")[2]]
    assert answer.headers["x-content-type-options"] == "nosniff"
    tag = answer.headers["etag"]
    for held, status in ((tag, 304), (f'"other", W/{tag}', 304), ("*", 304), (f"{tag}x", 200), ('"x"', 200)):
        again = client.get(f"/viewer/static/{file}", headers={"if-none-match": held})
        assert again.status_code == status, held
        assert status == 200 or again.content == b""


@pytest.mark.parametrize("file", ["nothing.js", "%2e%2e", "index.html.bak", "files.py"])
def test_no_other_file_is_served(client: httpx.Client, file: str) -> None:
    assert client.get(f"/viewer/static/{file}").status_code in (400, 404)


def test_a_slash_at_the_end_leads_to_the_page(client: httpx.Client) -> None:
    answer = client.get("/viewer/", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "../viewer")
    assert client.get("/viewer/", follow_redirects=True).text == client.get("/viewer").text


def test_a_setting_turns_it_off(engine: FakeVllm) -> None:
    with run_proxy([engine], viewer=False, store="memory:") as client:
        for path in ("", "/static/main.js", "/sessions", "/sessions/s", "/sessions/s/tokens"):
            answer = client.get(f"/viewer{path}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "viewer_off"), path


def test_the_page_asks_for_a_key(keys: Keyed) -> None:
    client, made = keys
    without = client.get("/viewer")
    assert (without.status_code, "main.js" in without.text) == (401, True)
    assert client.get("/viewer/static/main.js").status_code == 200
    assert client.get("/viewer", headers=_bearer(made["read"])).status_code == 200
    refused = client.get("/viewer", headers=_bearer(made["inference"]))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")


@pytest.mark.parametrize("path", ["", "/s", "/s/tokens?turn=x", "/s/drift?turn=x"])
def test_data_need_the_scope_read(keys: Keyed, path: str) -> None:
    client, made = keys
    statuses = [
        client.get(f"/viewer/sessions{path}", headers=headers).status_code
        for headers in ({}, _bearer("wrong"), _bearer(made["inference"]))
    ]
    assert statuses == [401, 401, 403]


def test_a_tenant_sees_its_own_sessions_only(keys: Keyed, engine: FakeVllm, name: str) -> None:
    client, made = keys
    _talk(client, engine, name, **_bearer(made["inference"]))
    own, other = _bearer(made["read"]), _bearer(made["other"])
    assert client.get(f"/viewer/sessions/{name}", headers=own).status_code == 200
    listed = [
        [row["id"] for row in client.get("/viewer/sessions", headers=headers).json()["data"]]
        for headers in (own, other)
    ]
    assert name in listed[0] and name not in listed[1]
    for path in ("", "/tokens?turn=x", "/drift?turn=x"):
        answer = client.get(f"/viewer/sessions/{name}{path}", headers=other)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")


def test_ids_are_those_of_the_record(client: httpx.Client, fake: FakeVllm, name: str) -> None:
    _talk(client, fake, name)
    recorded = client.get(f"/v1/sessions/{name}?ids=true").json()["turns"]
    tree = client.get(f"/viewer/sessions/{name}").json()
    assert [turn["id"] for turn in tree["turns"]] == [turn["id"] for turn in recorded]
    shared = ("parent", "source", "reused", "appended", "completion_tokens", "messages", "message")
    for shown, turn in zip(tree["turns"], recorded, strict=True):
        assert {field: shown[field] for field in shared} == {field: turn[field] for field in shared}
    tokens = _tokens(client, name, recorded[-1]["id"])
    expected: list[int] = []
    for place, turn in zip(tokens["turns"], recorded, strict=True):
        assert (place["id"], place["start"]) == (turn["id"], len(expected))
        expected += turn["appended_ids"]
        assert place["sampled"] == len(expected)
        for offset, logprob in enumerate(turn["logprobs"]):
            assert tokens["logprobs"][len(expected) + offset] == pytest.approx(logprob)
            assert tokens["flags"][len(expected) + offset] == 2 + 4
        expected += turn["completion_ids"]
    assert tokens["ids"] == expected
    assert tokens["flags"][0] == 0
    assert tokens["flags"][tokens["turns"][1]["start"]] == 1
    assert tokens["note"] == ""


def test_texts_of_the_ids_join_to_the_prompt(
    client: httpx.Client, fake: FakeVllm, tiny_model: TinyModel, name: str
) -> None:
    _talk(client, fake, name)
    turn = client.get(f"/v1/sessions/{name}").json()["turns"][-1]["id"]
    tokens = _tokens(client, name, turn)
    joined = "".join(tokens["texts"][str(token)] for token in tokens["ids"]).encode("latin-1").decode()
    assert joined == tiny_model.reference.decode(tokens["ids"])
    assert set(tokens["special"]) >= {END}


def test_drift_is_where_the_template_would_merge_what_was_split(
    client: httpx.Client, fake: FakeVllm, name: str
) -> None:
    _talk(client, fake, name)
    turns = client.get(f"/v1/sessions/{name}?ids=true").json()["turns"]
    sampled_at = turns[0]["appended"]
    lane = client.get(f"/viewer/sessions/{name}/drift", params={"turn": turns[-1]["id"]}).json()
    assert (lane["basis"], lane["reason"], lane["first"]) == ("template", "", sampled_at)
    [start, end, other, how] = lane["hunks"][0]
    assert (start, how) == (sampled_at, "same_text")
    assert end - start > len(other)
    first = client.get(f"/viewer/sessions/{name}/drift", params={"turn": turns[0]["id"]}).json()
    assert (first["first"], first["hunks"]) == (None, [])
    none = client.get(
        f"/viewer/sessions/{name}/drift", params={"turn": turns[-1]["id"], "basis": "before"}
    ).json()
    assert none["reason"]


def test_a_prompt_that_was_rendered_is_compared_with_the_turn_before(
    client: httpx.Client, fake: FakeVllm, name: str
) -> None:
    session = {"x-session-id": name}
    fake.replies.append(Reply(SPLIT))
    first = client.post(CHAT, json={"messages": [user("Hi")]}, headers=session).json()
    messages = [user("Hi"), first["choices"][0]["message"], user("And?")]
    changed = {"messages": messages, "chat_template_kwargs": {"unused": 1}}
    assert client.post(CHAT, json=changed, headers=session).headers["x-prompt-source"] == "rendered"
    tree = client.get(f"/viewer/sessions/{name}").json()
    one, two = tree["turns"]
    before = one["prompt_tokens"] + one["completion_tokens"]
    assert two["break"] == {"turn": one["id"], "equal": one["prompt_tokens"], "total": before}
    assert "template_kwargs_changed" in tree["meanings"]
    lane = client.get(f"/viewer/sessions/{name}/drift", params={"turn": two["id"]}).json()
    assert (lane["basis"], lane["first"]) == ("before", one["prompt_tokens"])
    [row] = [row for row in client.get("/viewer/sessions").json()["data"] if row["id"] == name]
    assert row["summary"]["drift"] == 1


@pytest.mark.parametrize(
    "query, param",
    [
        ("limit=0", "limit"), ("limit=501", "limit"), ("limit=x", "limit"), ("limit=1.5", "limit"),
        ("offset=-1", "offset"), ("offset=inf", "offset"), ("sort=best", "sort"), ("order=up", "order"),
        ("reward_min=x", "reward_min"), ("reward_max=nan", "reward_max"), ("rewarded=1", "rewarded"),
        ("drift=yes", "drift"), ("metadata=x", "metadata"), ("colour=red", "colour"),
        ("reward_min=inf", "reward_min"), ("reward_max=-1e999", "reward_max"),
        ("reward_min=1_0", "reward_min"), ("limit=%D9%A3", "limit"), ("limit=5%20", "limit"),
        ("model=a&model=b", "model"),
    ],
)  # fmt: skip
def test_a_wrong_parameter_of_the_list_is_named(client: httpx.Client, query: str, param: str) -> None:
    answer = client.get(f"/viewer/sessions?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "path, param",
    [
        ("tokens", "turn"), ("tokens?turn=x", "turn"), ("drift?turn=x", "turn"), ("?since=x", "since"),
        ("?colour=red", "colour"), ("tokens?basis=before", "basis"), ("drift?turn=x&turn=y", "turn"),
    ],
)  # fmt: skip
def test_a_wrong_parameter_of_a_session_is_named(
    client: httpx.Client, fake: FakeVllm, name: str, path: str, param: str
) -> None:
    _talk(client, fake, name)
    separator = "" if path.startswith("?") else "/"
    answer = client.get(f"/viewer/sessions/{name}{separator}{path}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    turn = client.get(f"/v1/sessions/{name}").json()["turns"][0]["id"]
    wrong = client.get(f"/viewer/sessions/{name}/drift", params={"turn": turn, "basis": "guess"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "basis")


def test_a_growing_session_is_read_from_a_time_on(client: httpx.Client, fake: FakeVllm, name: str) -> None:
    _talk(client, fake, name)
    turns = client.get(f"/viewer/sessions/{name}").json()["turns"]
    later = client.get(f"/viewer/sessions/{name}", params={"since": turns[1]["created"]}).json()
    assert [turn["id"] for turn in later["turns"]] == [turns[1]["id"]]
    seen = {"used": later["session"]["used"]}
    assert client.get(f"/viewer/sessions/{name}", params=seen).json()["turns"] == []
    client.post(f"/v1/sessions/{name}/reward", json={"reward": 1, "turn": turns[0]["id"]})
    assert client.get(f"/viewer/sessions/{name}", params=seen).json()["rewards"] == {turns[0]["id"]: 1.0}


def test_no_data_are_kept_by_caches(client: httpx.Client, fake: FakeVllm, name: str) -> None:
    _talk(client, fake, name)
    turn = client.get(f"/v1/sessions/{name}").json()["turns"][0]["id"]
    for path in ("", f"/{name}", f"/{name}/tokens?turn={turn}", f"/{name}/drift?turn={turn}"):
        headers = client.get(f"/viewer/sessions{path}").headers
        assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff")


def test_the_list_filters_and_sorts(client: httpx.Client, fake: FakeVllm, name: str) -> None:
    client.post("/v1/sessions", json={"id": name, "metadata": {"group": name, "step": 7}})
    _talk(client, fake, name)
    client.post(f"/v1/sessions/{name}/reward", json={"reward": 0.25})

    def found(**query: Any) -> bool:
        rows = client.get("/viewer/sessions", params={"limit": 500, **query}).json()["data"]
        return name in [row["id"] for row in rows]

    assert found() and found(search=name.upper()) and found(metadata=f"group={name}")
    assert found(metadata="step=7") and not found(metadata="step=8")
    assert found(reward_min=0.2, reward_max=0.3) and not found(reward_min=0.3)
    assert found(rewarded="true") and not found(rewarded="false")
    assert found(reason="first_turn", search=name) and not found(reason="no_match", search=name)
    assert not found(drift="true", search=name) and not found(problem="no_logprobs", search=name)
    assert found(**{"class": "unknown"}, search=name) and not found(model="other", search=name)
    for sort in ("used", "created", "id", "turns", "ids", "sampled", "reward", "drift"):
        both = [
            client.get(
                "/viewer/sessions", params={"sort": sort, "order": order, "rewarded": "true", "limit": 500}
            ).json()["data"]
            for order in ("asc", "desc")
        ]
        assert [row["id"] for row in both[0]] == [row["id"] for row in both[1]][::-1]
