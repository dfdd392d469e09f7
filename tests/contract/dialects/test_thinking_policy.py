"""Thinking of earlier turns: kept, or left out where the chat template leaves it out."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import CHAT, Talk, call, result, user
from tests.support.tiny_model import END, make_tiny_model
from tests.support.utils import Pair, run_proxy

_SHOWN = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
_CHAT = (
    "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{}{{{{ m.content }}}}"
    "{{% for c in m.tool_calls or [] %}}[{{{{ c.function.name }}}}]{{% endfor %}}<|im_end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
_ALWAYS, _NEVER = _CHAT.format(_SHOWN), _CHAT.format("")
_AFTER_LAST_USER = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + _CHAT.format("{% if loop.index0 > ns.last %}" + _SHOWN + "{% endif %}")
)
Start = Callable[..., Talk]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Makes a conversation with an engine that runs with a template, and a proxy before it."""
    with ExitStack() as stack:

        def made(template: str, **settings: Any) -> Talk:
            model = make_tiny_model(tmp_path / "model", template)
            engine = stack.enter_context(FakeVllm(model))
            proxy = stack.enter_context(run_proxy([engine], store="memory:", **settings))
            return Talk(Pair(engine, proxy), model)

        yield made


def _thought(index: int, **message: Any) -> Reply:
    ids = (90 + index, 74, END)
    return Reply(ids, message={"content": f"It is {index}.", "reasoning": f"thought {index}", **message})


def _reasons(talk: Talk, turns: int = 2) -> list[str]:
    """The reasons of the turns after the first, each after a user message."""
    talk.ask(reply=_thought(0))
    return [talk.ask(user(f"more {n}"), reply=_thought(n)).reason for n in range(1, turns + 1)]


def test_all_thinking_is_kept_by_default(start: Start) -> None:
    assert _reasons(start(_AFTER_LAST_USER), 1) == [""]


@pytest.mark.parametrize(
    "template, reasons",
    [
        (_ALWAYS, ["", ""]),
        (_NEVER, ["thinking_dropped"] * 2),
        (_AFTER_LAST_USER, ["thinking_dropped"] * 2),
    ],
)
def test_the_view_of_the_template_is_followed(start: Start, template: str, reasons: list[str]) -> None:
    talk = start(template, thinking_policy="template")
    assert _reasons(talk) == reasons


def test_thinking_stays_while_tools_are_called(start: Start) -> None:
    """A template that drops it at the next user message keeps it before: these turns are one sample."""
    talk = start(_AFTER_LAST_USER, thinking_policy="template")
    calls = [call(), call()]
    talk.ask(reply=_thought(0, tool_calls=[calls[0]]))
    assert talk.ask(result(calls[0], "4"), reply=_thought(1, tool_calls=[calls[1]])).reason == ""
    assert talk.ask(result(calls[1], "5"), reply=_thought(2)).reason == ""
    assert talk.ask(user("more"), reply=_thought(3)).reason == "thinking_dropped"


def test_a_client_that_drops_the_thinking_gets_the_view_of_the_template(start: Start) -> None:
    talk = start(_ALWAYS, thinking_policy="template")
    talk.ask(reply=_thought(0))
    del talk.messages[-1]["reasoning"]
    assert talk.ask(user("more")).reason == ""


def test_sessions_choose(start: Start) -> None:
    talk = start(_NEVER)
    talk.headers["x-session-id"] = "chosen"
    described = {"id": "chosen", "defaults": {"thinking_policy": "template"}}
    assert talk.pair.client.post("/v1/sessions", json=described).is_success
    assert _reasons(talk, 1) == ["thinking_dropped"]
    assert len(talk.pair.client.get("/v1/sessions/chosen/samples").json()["samples"]) == 2


@pytest.mark.parametrize(
    ("path", "name"), [(CHAT, "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input")]
)
def test_requests_of_every_format_choose(start: Start, path: str, name: str) -> None:
    talk = start(_NEVER)
    fields = {"model": "tiny", "thinking_policy": "template"} | ({"max_tokens": 9} if name != "input" else {})
    talk.pair.fake.replies.append(_thought(0))
    said = [user("Hi")]
    answer = talk.pair.client.post(path, json={**fields, name: said}).json()
    said += answer.get("output") or [{"role": "assistant", "content": _content(answer)}]
    second = talk.pair.client.post(path, json={**fields, name: [*said, user("more")]})
    assert second.headers["x-prompt-reason"] == "thinking_dropped"
    assert not [seen for seen in talk.pair.fake.requests if b"thinking_policy" in seen.body]
    refused = talk.pair.client.post(path, json={**fields, name: said, "thinking_policy": "drop"})
    assert refused.status_code == 400 and "thinking_policy" in refused.text


def _content(answer: dict[str, Any]) -> Any:
    return answer["choices"][0]["message"]["content"] if "choices" in answer else answer["content"]
