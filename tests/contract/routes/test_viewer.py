"""`/viewer`: the page, who gets it, and what it reads. `tests/contract/viewer` has the page in a browser."""

import json
import struct
from array import array
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from proxy.key_command import add_key
from proxy.viewer.files import FOLDER
from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import CHAT, user
from tests.support.tiny_model import END, TinyModel
from tests.support.utils import run_proxy

SPLIT = (74, 71, 78, 78, 81, END)
"""Ids that the tokenizer would merge, had it encoded their text."""
_KINDS = {"js": "text/javascript", "css": "text/css", "html": "text/html", "svg": "image/svg+xml"}


def _talk(client: httpx.Client, engine: FakeVllm, name: str, **headers: str) -> list[dict[str, Any]]:
    """Two turns in a session; the first samples ids that no tokenizer would make of its text."""
    session = {"x-session-id": name, **headers}
    engine.replies.append(Reply(SPLIT))
    messages = [user("Hi")]
    first = client.post(CHAT, json={"messages": messages}, headers=session).json()
    messages += [first["choices"][0]["message"], user("And?")]
    assert client.post(CHAT, json={"messages": messages}, headers=session).status_code == 200
    recorded = client.get(f"/v1/sessions/{name}?ids=true", headers=headers).json()
    turns: list[dict[str, Any]] = recorded.get("turns", [])
    return turns


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
    flags = [*body[start + 8 * count :]]
    return header | {"ids": ids.tolist(), "logprobs": logprobs.tolist(), "flags": flags}


def test_the_page_loads_only_from_its_origin(client: httpx.Client) -> None:
    page = client.get("/viewer")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    assert page.headers["x-content-type-options"] == "nosniff"
    for part in ("<script>", "style=", "http://", "https://", "onload", "onclick"):
        assert part not in page.text
    moved = client.get("/viewer/", follow_redirects=False)
    assert (moved.status_code, moved.headers["location"]) == (307, "../viewer")


def test_every_file_is_served_with_its_type_and_no_other(client: httpx.Client) -> None:
    for file in sorted(path.name for path in FOLDER.iterdir()):
        answer = client.get(f"/viewer/static/{file}")
        assert (answer.status_code, answer.headers["x-content-type-options"]) == (200, "nosniff")
        assert answer.headers["content-type"].split(";")[0] == _KINDS[file.rpartition(".")[2]]
    tag = answer.headers["etag"]
    for held, status in ((f'"other", W/{tag}', 304), ('"x"', 200)):
        again = client.get(f"/viewer/static/{file}", headers={"if-none-match": held})
        assert (again.status_code, again.content == b"") == (status, status == 304), held
    for file in ("nothing.js", "%2e%2e", "index.html.bak", "files.py"):
        assert client.get(f"/viewer/static/{file}").status_code in (400, 404)


def test_a_setting_turns_it_off(engine: FakeVllm) -> None:
    with run_proxy([engine], viewer=False, store="memory:") as client:
        for path in ("", "/static/main.js", "/sessions", "/sessions/s", "/sessions/s/tokens"):
            answer = client.get(f"/viewer{path}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "viewer_off"), path


@pytest.fixture(scope="module")
def keys(
    engine: FakeVllm, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[httpx.Client, dict[str, dict[str, str]]]]:
    """A client of a proxy with keys, and headers with each key; `other` is another tenant's."""
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    made = [("inference", "inference", "a"), ("read", "read", "a"), ("other", "read", "b")]
    keys = {name: add_key(file, name, [scope], tenant) for name, scope, tenant in made}
    with run_proxy([engine], reader=keys["read"], api_key_file=file, store="memory:") as client:
        yield client, {name: {"authorization": f"Bearer {key}"} for name, key in keys.items()}


def test_data_need_the_scope_read_of_their_tenant(
    keys: tuple[httpx.Client, dict[str, dict[str, str]]], engine: FakeVllm, name: str
) -> None:
    client, headers = keys
    without = client.get("/viewer")
    assert (without.status_code, "main.js" in without.text) == (401, True)  # the page asks for a key
    assert client.get("/viewer/static/main.js").status_code == 200
    assert client.get("/viewer", headers=headers["read"]).status_code == 200
    _talk(client, engine, name, **headers["inference"])
    for path in (f"/{name}", f"/{name}/tokens?turn=x", f"/{name}/drift?turn=x", ""):
        url = f"/viewer/sessions{path}"
        assert client.get(url).status_code == 401
        assert client.get(url, headers=headers["inference"]).status_code == 403
        assert client.get(url, headers=headers["other"]).status_code == (404 if path else 200)
    assert client.get("/viewer/sessions", headers=headers["other"]).json()["data"] == []
    assert name in client.get("/viewer/sessions", headers=headers["read"]).text


def test_the_page_reads_what_was_recorded(
    client: httpx.Client, fake: FakeVllm, tiny_model: TinyModel, name: str
) -> None:
    recorded = _talk(client, fake, name)
    tree = client.get(f"/viewer/sessions/{name}").json()
    shared = ("id", "parent", "source", "reused", "appended", "completion_tokens", "messages", "message")
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
    assert (tokens["ids"], tokens["note"]) == (expected, "")
    assert tokens["flags"][0] == 0
    assert tokens["flags"][tokens["turns"][1]["start"]] == 1
    joined = "".join(tokens["texts"][str(token)] for token in expected).encode("latin-1").decode()
    assert joined == tiny_model.reference.decode(expected)
    assert set(tokens["special"]) >= {END}
    turn = recorded[0]["id"]
    for path in ("", f"/{name}", f"/{name}/tokens?turn={turn}", f"/{name}/drift?turn={turn}"):
        assert client.get(f"/viewer/sessions{path}").headers["cache-control"] == "no-store"


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


def test_a_wrong_parameter_is_named(client: httpx.Client, fake: FakeVllm, name: str) -> None:
    _talk(client, fake, name)
    wrong = "limit=0 limit=501 limit=x limit=%D9%A3 sort=best order=up reward_min=inf reward_max=nan"
    wrong += " rewarded=1 drift=yes metadata=x colour=red model=a&model=b"
    paths = {f"?{query}": query.partition("=")[0] for query in wrong.split()}
    paths |= {f"/{name}/tokens": "turn", f"/{name}/tokens?turn=x": "turn", f"/{name}/drift?turn=x": "turn"}
    paths |= {f"/{name}?since=x": "since", f"/{name}/tokens?basis=before": "basis"}
    for path, param in paths.items():
        answer = client.get(f"/viewer/sessions{path}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), path
