"""`tokenproxy demo` on a running server: the real proxy before the fake engine."""

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.ports import held_port
from tests.support.talk import call
from tests.support.tiny_model import END, TinyModel
from tokenproxy.demo import main
from tokenproxy.demo.conversation import SCRIPT, Conversation, Turn
from tokenproxy.demo.main import run_demo

Capture = pytest.CaptureFixture[str]


def _demo(url: object, *, serve: bool = False) -> int:
    return run_demo(Namespace(serve=serve, url=str(url), log=None))


def _drifting(model: TinyModel) -> Reply:
    """Letters that a tokenizer would not give for their text, and two calls."""
    letters = [model.encode(letter)[0] for letter in "the"]
    assert model.encode("the") != letters
    calls = [call("calculator", '{"a": 2, "operator": "*", "b": 3}') for _ in range(2)]
    return Reply(ids=(*letters, END), message={"tool_calls": calls})


def test_three_conversations(
    client: httpx.Client,
    fake: FakeVllm,
    tiny_model: TinyModel,
    capsys: Capture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fake.usual = _drifting(tiny_model)
    assert _demo(client.base_url.join("v1/")) == 0
    printed = capsys.readouterr().out
    count = len(SCRIPT) - 1
    for route in ("token route", "\nchat route"):
        assert f"{route}: {count} of {count} follow-up turns exact (100%)" in printed
    assert f"stock chat route: 0 of {count} follow-up turns exact (0%), {count} drifted" in printed

    page, _, sessions = printed.split()[-1].partition("#/compare/")
    names = unquote(sessions).split("/-")[:3]
    names = [name.removeprefix("/") for name in names]
    html = Path(page.removeprefix("file://")).read_text()
    [data] = re.findall(r'<script [^>]*type="application/json"[^>]*>(.*?)</script>', html, re.DOTALL)
    trees = [json.loads(data)["trees"][name] for name in names]
    counts = [(len(tree["turns"]), tree["session"]["summary"]["drifted"]) for tree in trees]
    assert counts == [(len(SCRIPT), 0), (len(SCRIPT), 0), (len(SCRIPT), count)]  # as the table
    reasons = [[turn["reason"] for turn in tree["turns"]] for tree in trees]
    assert reasons == [[first, *[None] * count] for first in ("no_ids", "first_turn", "first_turn")]

    sent = [seen.json for seen in fake.seen("/v1/chat/completions")][-len(SCRIPT) :]
    assert [body["tool_choice"] for body in sent] == [
        {"tools": "required", "answer": "auto"}[step.kind] for step in SCRIPT
    ]
    assert len({body["seed"] for body in sent}) == len(SCRIPT)
    assistant, *results = sent[1]["messages"][1:]
    assert [result["tool_call_id"] for result in results] == [each["id"] for each in assistant["tool_calls"]]
    assert [json.loads(result["content"]) for result in results] == [{"value": 6}] * 2


@pytest.mark.parametrize("drifting, code", [("token route", 1), ("chat route", 1), ("stock chat route", 0)])
def test_the_exit_code_says_whether_a_route_drifts(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, capsys: Capture, drifting: str, code: int
) -> None:
    def converse(route: Any, model: str) -> Conversation:
        reused = 12 if route.name == drifting else 15
        turns = (
            Turn(1, "tools", 10, 5, 0, 0, 0, 0.1),
            Turn(2, "answer", 20, 5, 15, reused, 0, 0.1),
        )
        return Conversation(route.name, turns)

    monkeypatch.setattr(main, "converse", converse)
    assert _demo(client.base_url) == code
    assert f"{drifting}: 0 of 1 follow-up turns exact" in capsys.readouterr().out


def test_what_cannot_be_run(client: httpx.Client, fake: FakeVllm, capsys: Capture) -> None:
    with held_port() as port:
        url = f"http://127.0.0.1:{port}"
        assert _demo(url) == 2
        assert f"no OpenAI server responds at {url}" in capsys.readouterr().err
        main._show_rollouts(url, "none", ["s"])
        assert "the rollouts cannot be shown: no proxy responds" in capsys.readouterr().err
    assert _demo(fake.url) == 2
    assert "does not have the token route: start it with `tokenproxy vllm`" in capsys.readouterr().err
    fake.usual = Reply(silent=("ids",))
    assert _demo(client.base_url) == 2
    printed = capsys.readouterr()
    assert "no `choices[0].token_ids`" in printed.err and printed.out == ""
    assert _demo(client.base_url, serve=True) == 2
    assert "--serve starts a server, --url uses a running one" in capsys.readouterr().err
