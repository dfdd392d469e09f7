"""`tokenproxy view --serve`: the page of a store without a proxy and without an engine."""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.child_environment import python_path_without_torch
from tests.support.store_utils import opened
from tests.support.talk import CHAT
from tests.support.trees import add_rollouts
from tests.support.utils import run_server
from tokenproxy.app.view_app import create_view_app
from tokenproxy.cli.main import main
from tokenproxy.settings import Settings

_TENANT = "0123456789abcdef" * 2
_IDS = ("plain", f"{_TENANT}/keyed", "a=2Fb")
_NAMES = [name.replace("/", "=2F") for name in _IDS]


async def _fill(url: str) -> None:
    """Record rollouts with and without a key."""
    async with opened(url) as store:
        await add_rollouts(store, *_IDS)


@pytest.fixture
def page(shared_url: str) -> Iterator[httpx.Client]:
    asyncio.run(_fill(shared_url))
    app = create_view_app(Settings(store=shared_url, store_required=True), None)
    with run_server(app) as url, httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
        yield client


def test_all_sessions_are_shown_and_nothing_can_be_changed(page: httpx.Client) -> None:
    assert page.get("/viewer").status_code == page.get("/viewer/static/main.js").status_code == 200
    listed = page.get("/viewer/sessions").json()["data"]
    assert sorted(row["id"] for row in listed) == sorted(_NAMES)
    for name, rollout in zip(_NAMES, _IDS, strict=True):
        session = f"/viewer/sessions/{name}"
        tree = page.get(session).json()
        assert (tree["session"]["id"], len(tree["turns"])) == (name, 4)
        for kind in ("tokens", "drift"):
            answer = page.get(f"{session}/{kind}?turn={rollout}-b")
            assert answer.status_code == 200 and b"--tokenizer MODEL" in answer.content
        for method, path in (("DELETE", f"/v1/sessions/{name}"), ("POST", f"/v1/sessions/{name}/reward")):
            assert page.request(method, path, json={"reward": 1}).status_code == 404
    assert page.post(CHAT, json={}).status_code == page.get("/v1/models").status_code == 404
    assert page.get("/viewer/sessions", headers={"host": "evil.example"}).status_code == 400
    assert page.get("/viewer/sessions", headers={"origin": "http://evil.example"}).status_code == 403
    assert page.get("/viewer/sessions").json()["data"] == listed


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "x.db"
    asyncio.run(_fill(f"sqlite://{file}"))
    command = [sys.executable, "-m", "tokenproxy", "view", "--serve", str(file), "--port", "0"]
    environment = {"PYTHONPATH": python_path_without_torch(), "TOKENPROXY_API_KEY": "of-the-proxy"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        url, _, rest = process.stdout.readline().partition(" ")
        assert rest == f"shows {file} until Ctrl-C\n"
        listed = httpx.get(f"{url}/sessions", trust_env=False).json()["data"]
        assert "plain" in [row["id"] for row in listed]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "pass --serve to see all"),
        (["--serve", "missing.db"], "no store at"),
        (["--serve", "FILE", "--url", "http://a:1"], "neither --url"),
        (["--serve", "FILE", "--port", "PORT"], "pass another --port"),
        (["missing.jsonl"], "there is no file missing.jsonl"),
    ],
)
def test_wrong_use_is_told(
    sqlite_url: str, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    asyncio.run(_fill(sqlite_url))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {"FILE": sqlite_url, "PORT": str(taken.getsockname()[1])}
        assert main(["view", *[places.get(word, word) for word in arguments]]) == 1 + (
            "PORT" not in arguments
        )
    assert words in capsys.readouterr().err
