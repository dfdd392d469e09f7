"""Chat templates rendered by a real vLLM: this package renders the same ids, and appends the same text.

The engine takes the template with the request. Its tokenizer is the demo model's, which has few of the added
tokens that other models' templates print: here these are text. What follows from tokens is tested in
tests/unit/templates.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance.conftest import Server
from tests.support.templates.corpus import ChatTemplate, corpus, sample
from tokenization import ChatTokenizer, TokenizationError

Message = dict[str, Any]
RENDER = "/v1/chat/completions/render"
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
_SYSTEM = {"role": "system", "content": "Be brief. /no_think"}
_QUESTION = {"role": "user", "content": "What is the weather in Zürich?"}
_ANSWER = {"role": "assistant", "content": "It is sunny."}
_MORE = {
    "role": "user",
    "content": [{"type": "text", "text": "And in"}, {"type": "text", "text": "Oslo? 四"}],
}
_DEVELOPER = {"role": "developer", "content": "Be polite."}


def _call(number: int) -> Message:
    function = {"name": "weather", "arguments": '{"city": "Zürich", "days": [1, null]}'}
    call = {"id": f"call{number:05}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(number: int) -> Message:
    return {"role": "tool", "tool_call_id": f"call{number:05}", "content": '{"sun": true}\n 17 °C'}


_CONVERSATIONS: dict[str, tuple[list[Message], list[Message]]] = {
    "answer": ([_QUESTION, _ANSWER], [_MORE]),
    "system": ([_SYSTEM, _QUESTION, _ANSWER, _QUESTION, _ANSWER], [_MORE]),
    "developer": ([_DEVELOPER, _QUESTION, _ANSWER], [_MORE]),
    "call": ([_QUESTION, _call(1)], [_result(1)]),
    "second call": ([_QUESTION, _call(1), _result(1), _ANSWER, _QUESTION, _call(2)], [_result(2)]),
    "call, then user": ([_QUESTION, _call(1)], [_result(1), _MORE]),
}
"""Histories and new messages, by name."""


def _templates() -> list[ChatTemplate]:
    return [*corpus(("trl",)), *sample()]


def _rendered(engine: httpx.Client, template: ChatTemplate, messages: list[Message]) -> list[int] | None:
    """The engine's prompt ids; None if it refuses the messages."""
    body = {"messages": messages, "tools": _TOOLS, "chat_template": template.text, "max_tokens": 1}
    response = engine.post(RENDER, json=body)
    if response.status_code != 200:
        assert response.status_code in (400, 500), response.text
        return None
    ids: list[int] = response.json()["token_ids"]
    return ids


def _shows_the_time(template: ChatTemplate) -> bool:
    """Whether two renderings may differ by the time between them."""
    return "%S" in template.text


@pytest.mark.timeout(900)
def test_templates_are_rendered_as_vllm_renders_them(servers: Mapping[str, Server], model: Path) -> None:
    compared = refused = appended = 0
    problems: list[str] = []
    with httpx.Client(base_url=servers["in front"].engine.url, timeout=60) as engine:
        for template in _templates():
            tokenizer = ChatTokenizer.load(model, template.text)
            for name, (history, new) in _CONVERSATIONS.items():
                expected = _rendered(engine, template, [*history, *new])
                where = f"{template.name} | {name}"
                try:
                    own = tokenizer.render([*history, *new], tools=_TOOLS)
                except TokenizationError as error:
                    if expected is not None:
                        problems.append(f"{where}: refused: {error}")
                    continue
                if own != expected:
                    if _shows_the_time(template):
                        continue
                    shown = tokenizer.decode(expected)[-200:] if expected is not None else "a refusal"
                    problems.append(f"{where}: {tokenizer.decode(own)[-200:]!r} instead of {shown!r}")
                    continue
                compared += 1
                try:
                    added = tokenizer.append([7], new, history=history, tools=_TOOLS, finish_reason="length")
                except TokenizationError:
                    refused += 1
                    continue
                appended += 1
                # the template prints no more of the turn than was sampled, and nothing else after it
                if not tokenizer.decode(expected).endswith(tokenizer.decode(added.prompt_ids[1:])):
                    problems.append(f"{where}: appended {tokenizer.decode(added.prompt_ids[1:])!r}")
    assert not problems, "\n".join([f"{len(problems)} problems", *problems[:20]])
    assert compared > 200
    assert appended > 0.8 * compared, (appended, refused)
