"""`/viewer`: the page, who gets it, and what it reads. `tests/contract/viewer` has the page in a browser."""

import time
from pathlib import Path

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm
from tests.support.talk import CHAT, user
from tests.support.utils import run_proxy, wait_until
from tokenproxy.cli.key import add_key
from tokenproxy.cli.main import main
from tokenproxy.viewer.page import FOLDER

_KINDS = {"js": "text/javascript", "css": "text/css", "html": "text/html", "svg": "image/svg+xml"}


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
    again = client.get(f"/viewer/static/{file}", headers={"if-none-match": f'"other", W/{tag}'})
    assert (again.status_code, again.content) == (304, b"")
    for file in ("nothing.js", "%2e%2e", "index.html.bak", "files.py"):
        assert client.get(f"/viewer/static/{file}").status_code in (400, 404)


def test_data_need_the_scope_read_of_their_tenant(
    engine: FakeVllm, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.yaml"
    made = [("inference", "inference", "a"), ("read", "read", "a"), ("other", "read", "b")]
    keys = {key: add_key(file, key, [scope], tenant) for key, scope, tenant in made}
    with run_proxy([engine], reader=keys["read"], api_key_file=file, store="memory:") as client:
        headers = {key: {"authorization": f"Bearer {value}"} for key, value in keys.items()}
        without = client.get("/viewer")
        assert (without.status_code, "main.js" in without.text) == (401, True)  # the page asks for a key
        assert client.get("/viewer/static/main.js").status_code == 200
        assert client.get("/viewer", headers=headers["read"]).status_code == 200
        session = {"x-session-id": name, **headers["inference"]}
        assert client.post(CHAT, json={"messages": [user("Hi")]}, headers=session).status_code == 200
        for path in (f"/{name}", f"/{name}/tokens?turn=x", f"/{name}/drift?turn=x", ""):
            url = f"/viewer/sessions{path}"
            assert client.get(url).status_code == 401
            assert client.get(url, headers=headers["inference"]).status_code == 403
            assert client.get(url, headers=headers["other"]).status_code == (404 if path else 200)
        assert client.get("/viewer/sessions", headers=headers["other"]).json()["data"] == []
        for key, hint in (([], "pass --api-key KEY"), (["--api-key", keys["other"]], "one of its?")):
            assert main(["view", name, "--url", str(client.base_url), *key]) == 1
            assert hint in capsys.readouterr().err
        shown = client.get("/viewer/sessions", headers=headers["read"])
        assert name in shown.text and shown.headers["cache-control"] == "no-store"


def test_a_wrong_parameter_is_named(client: httpx.Client, fake: FakeVllm, name: str) -> None:
    client.post(CHAT, json={"messages": [user("Hi")]}, headers={"x-session-id": name})
    wrong = "limit=0 limit=1001 limit=x limit=%D9%A3 before=x sort=reward search=a&search=b messages=x"
    paths = {f"?{query}": query.partition("=")[0] for query in wrong.split()}
    paths |= {f"/{name}/tokens": "turn", f"/{name}/tokens?turn=x": "turn", f"/{name}/drift?turn=x": "turn"}
    paths |= {f"/{name}?since=x": "since", f"/{name}/tokens?basis=before": "basis"}
    for path, param in paths.items():
        answer = client.get(f"/viewer/sessions{path}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), path


def test_a_session_without_turns_shows_its_refusals(client: httpx.Client, name: str) -> None:
    client.post("/v1/sessions", json={"id": name})
    shown = client.get(f"/viewer/sessions/{name}").json()
    assert (shown["turns"], shown["refusals"]["refusals"]) == ([], 0)
    body = {"messages": [user("Hi")], "model": "other"}
    for _ in range(2):
        assert client.post(CHAT, json=body, headers={"x-session-id": name}).status_code == 404
    wait_until(lambda: client.get(f"/viewer/sessions/{name}").json()["refusals"]["refusals"] == 2)
    refusals = client.get(f"/viewer/sessions/{name}?used={time.time()}").json()["refusals"]
    assert refusals["last_refusal"] == "404 The model `other` does not exist."
