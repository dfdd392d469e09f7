"""Agents that replace their history by a summary, on each wire: the chain in all that is read."""

import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import CHAT, user
from tests.support.tiny_model import END, TinyModel
from tests.support.utils import run_proxy

_SYSTEM = "You are a careful engineer. Work in small steps, and say what you do."
_TASK = "Fix the parser."
_PLAN = "I read `src/parser.py` first, because the report names it, and then I run the tests of nested lists."
_SUMMARY = (
    "1. The user wants src/parser.py to read nested lists.\n2. The lexer knows brackets (src/lexer.py); "
    "tests/test_parser.py::test_lists fails.\n3. Next: write the recursive rule."
)
_FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {}}}


class Wire:
    """Sends the requests of one session; the engine answers with texts of the caller's choice."""

    def __init__(self, client: httpx.Client, fake: FakeVllm, model: TinyModel) -> None:
        self.client, self._fake, self._model = client, fake, model
        self.session = secrets.token_hex(6)
        self.sampled = 0

    def send(self, path: str, answer: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        """One request; its response."""
        ids = (*self._model.encode(answer)[:50], END)
        self._fake.replies.append(Reply(ids, message={"content": answer}))
        self.sampled += len(ids)
        response = self.client.post(path, json={"model": "tiny", **body}, headers=headers)
        assert response.status_code == 200, response.text
        return response.json()


def _plain(wire: Wire) -> None:
    """An agent that says nothing of itself, and whose next attempt begins with its summary."""
    headers, system = {"x-session-id": wire.session}, {"role": "system", "content": _SYSTEM}

    def ask(answer: str, *messages: dict[str, Any]) -> None:
        wire.send(CHAT, answer, {"messages": [system, *messages]}, headers)

    said = [user(_TASK), {"role": "assistant", "content": _PLAN}, user("Sum it up.")]
    ask(_PLAN, said[0])
    ask(_SUMMARY, *said)
    ask("Done.", user(f"{_TASK}\n\nNotes of your earlier self: {_SUMMARY}"))


def _claude_code(wire: Wire) -> None:
    """The summary is of the messages before the last one, which is kept after it."""

    def ask(answer: str, kind: str, messages: list[dict[str, Any]], **agent: str) -> None:
        headers = {"x-claude-code-session-id": wire.session, "x-claude-code-request-class": kind, **agent}
        tools = [{"name": "look", "input_schema": _FUNCTION["parameters"]}]
        body = {"max_tokens": 99, "system": _SYSTEM, "messages": messages, "tools": tools}
        wire.send("/v1/messages?beta=true", answer, body, headers)

    said = [user(_TASK), {"role": "assistant", "content": _PLAN}, user("Sum it up.")]
    ask(_PLAN, "main", said[:1])
    ask("Two.", "subagent", [user(f"Count. {_PLAN} {_PLAN[::-1]}")], **{"x-claude-code-agent-id": "a1"})
    kept = f"{_PLAN} {_SYSTEM} Now."
    ask(kept, "main", [*said[:2], user("Go on.")])
    ask(f"<analysis>Hm.</analysis>\n\n<summary>\n{_SUMMARY}\n</summary>", "compaction", said)
    continued = f"This session is being continued from another one. Summary:\n{_SUMMARY}\n\nGo on."
    ask("Done.", "main", [user(continued), {"role": "assistant", "content": kept}, user("And?")])


def _codex(wire: Wire) -> None:
    """The request for the summary has no tools, so it begins a conversation too."""
    thread = {"session-id": wire.session, "thread-id": wire.session}

    def ask(answer: str, kind: str, items: list[dict[str, Any]], **fields: Any) -> None:
        metadata = json.dumps({"request_kind": kind, "thread_source": "user"})
        body = {"instructions": _SYSTEM, "input": items, "store": False, **fields}
        wire.send("/v1/responses", answer, body, {**thread, "x-codex-turn-metadata": metadata})

    tools = [{"type": "function", **_FUNCTION}]
    said = [user(_TASK), {"role": "assistant", "content": "Yes."}]
    ask("Yes.", "turn", said[:1], tools=tools)
    ask(_SUMMARY, "compaction", [*said, user("You are performing a CONTEXT CHECKPOINT COMPACTION.")])
    prefix = "Another language model started to solve this problem and produced a summary:"
    ask("Done.", "turn", [user(_TASK), user(f"{prefix}\n{_SUMMARY}")], tools=tools)


def _compacted(wire: Wire) -> None:
    """The client holds a name of the summary, never its text."""
    headers, fields = {"x-session-id": wire.session}, {"instructions": _SYSTEM}
    begun = wire.send("/v1/responses", _PLAN, {**fields, "input": _TASK}, headers)
    items = [user(_TASK), *begun["output"]]
    compact = wire.send("/v1/responses/compact", _SUMMARY, {**fields, "input": items}, headers)
    wire.send("/v1/responses", "Done.", {**fields, "input": [*compact["output"], user("And?")]}, headers)


@pytest.fixture(scope="module")
def fake(tiny_model: TinyModel) -> Iterator[FakeVllm]:
    with FakeVllm(tiny_model) as fake:
        yield fake


@pytest.fixture(scope="module")
def client(fake: FakeVllm) -> Iterator[httpx.Client]:
    with run_proxy([fake], store="memory:") as client:
        yield client


@pytest.mark.parametrize(
    ("drive", "chain"),
    [
        # for each segment the position of the turn that caused it
        (_plain, [None, 1]),
        (_claude_code, [None, 3]),
        (_codex, [None, 0, 1]),
        (_compacted, [None, 1]),
    ],
)
def test_a_chain(
    client: httpx.Client,
    fake: FakeVllm,
    tiny_model: TinyModel,
    drive: Callable[[Wire], None],
    chain: list[int | None],
) -> None:
    wire = Wire(client, fake, tiny_model)
    drive(wire)
    session = f"/v1/sessions/{wire.session}"
    client.post(f"{session}/reward", json={"reward": 0.5})
    turns = client.get(session).json()["turns"]
    ids = [turn["id"] for turn in turns]
    expected = [(number, None if at is None else ids[at]) for number, at in enumerate(chain)]

    roots = [turn for turn in turns if turn["parent"] is None and not turn["agent"]]
    assert [(turn["segment"], turn["continues"]) for turn in roots] == expected
    samples = client.get(f"{session}/samples").json()["samples"]
    main = [sample for sample in samples if not sample["agent"]]
    assert list(dict.fromkeys((each["segment"], each["continues"] or None) for each in main)) == expected
    held = {(each["segment"], turn["id"]) for each in main for turn in each["turns"]}
    assert {(number - 1, cause) for number, cause in expected if cause} <= held
    assert sum(sum(sample["loss_mask"]) for sample in samples) == wire.sampled
    assert {sample["reward"] for sample in samples} == {0.5}

    feed = client.get("/v1/samples").json()["data"]
    [delivered] = [each["samples"] for each in feed if each["rollout"] == wire.session]
    assert [sample | {"revision": 0} for sample in delivered] == samples
    shown = client.get(f"/viewer/sessions/{wire.session}").json()["turns"]
    assert [(turn["segment"], turn["continues"]) for turn in shown] == [
        (turn["segment"], turn["continues"]) for turn in turns
    ]
