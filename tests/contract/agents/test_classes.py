"""Sessions of coding agents, over HTTP and on disk: agents, classes, and samples of some classes."""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm
from tests.support.talk import CHAT, Message, user
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy
from tokenproxy.cli.main import main

_CLASS, _AGENT = "x-claude-code-request-class", "x-claude-code-agent-id"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite://{tmp_path_factory.mktemp('classes') / 'rollouts.db'}"


@pytest.fixture(scope="module")
def client(tiny_model: TinyModel, store: str) -> Iterator[httpx.Client]:
    with FakeVllm(tiny_model) as engine, run_proxy([engine], store=store) as client:
        yield client


def _send(client: httpx.Client, messages: list[Message], session: str, headers: dict[str, str]) -> Message:
    """One request; the assistant's message."""
    headers = {"x-claude-code-session-id": session, **headers}
    answer = client.post(CHAT, json={"messages": messages}, headers=headers)
    assert answer.status_code == 200, answer.text
    message: Message = answer.json()["choices"][0]["message"]
    return message


@pytest.fixture
def stated(client: httpx.Client) -> str:
    """A session of two main turns, a summary after them, a sub-agent, and one that this started."""
    session = secrets.token_hex(6)
    messages = [user(secrets.token_hex(4))]
    for text in ("More", "Summarise"):
        messages += [_send(client, messages, session, {_CLASS: "main"}), user(text)]
    _send(client, messages, session, {_CLASS: "compaction"})
    for agent, parent in (("a1", ""), ("a2", "a1")):
        headers = {_CLASS: "subagent", _AGENT: agent, "x-claude-code-parent-agent-id": parent}
        _send(client, [user(secrets.token_hex(4))], session, headers)
    return session


def _get(client: httpx.Client, path: str, **query: Any) -> Any:
    answer = client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_tree_has_the_agents(client: httpx.Client, stated: str) -> None:
    tree = _get(client, f"/v1/sessions/{stated}")
    main_agent, first, second = tree["agents"]
    assert (main_agent["id"], main_agent["parent"], main_agent["turns"]) == (None, None, 3)
    assert main_agent["classes"] == ["main", "compaction"]
    assert main_agent["first_turn"] == tree["turns"][0]["id"]
    assert [(each["id"], each["parent"]) for each in (first, second)] == [("a1", None), ("a2", "a1")]
    assert [turn["agent"] for turn in tree["turns"]] == [None, None, None, "a1", "a2"]
    assert tree["turns"][4]["parent_agent"] == "a1"


def test_the_export(stated: str, store: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["export", "--store", store, "--out", str(out), "--class", "main"]) == 0
    [row] = [row for row in map(json.loads, out.read_text().splitlines()) if row["rollout"] == stated]
    assert (row["request_class"], row["agent"]) == ("main", "")
