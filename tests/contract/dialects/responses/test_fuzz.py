"""Whatever clients send to `/v1/responses`, it is answered, and never with a defect of the proxy."""

import copy
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import jinja2
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.dialects.responses.dialogue import events_of
from tests.contract.dialects.responses.test_shapes import SHAPES
from tests.support.fake_vllm import FakeVllm, error_body
from tests.support.utils import Pair

_JUNK: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 10**30, 2**63, "", "x", "\x00", "\ud83d", "auto", "none", "resp_1"),
    *([], {}, [[]], [{}], [None], ["a"], {"type": "x"}, {"type": None}, {"type": "function"}),
    *({"type": "message"}, {"id": "msg_1"}, {"type": "item_reference", "id": "msg_" + "0" * 36}),
    *({"type": "compaction", "encrypted_content": "0" * 36}, {"type": "compaction_trigger"}),
    *({"role": "assistant"}, {"type": "reasoning", "summary": 1}),
]
_NAMES = [
    *("input", "instructions", "tools", "tool_choice", "text", "reasoning", "include", "store", "stream"),
    *("model", "max_output_tokens", "previous_response_id", "temperature", "top_logprobs", "metadata"),
    *("background", "parallel_tool_calls", "truncation", "chat_template_kwargs", "kv_transfer_params"),
    *("stream_options", "n", "stop", "seed", "conversation", "prompt", "chat_template", "include_reasoning"),
]
_SHAPES = [{**shape, **shape.get("extra_body", {})} for shape in SHAPES.values()]
_NEVER = frozenset({500, 502, 503, 504})


def _mutated(value: Any, choose: Callable[[int], int], depth: int = 0) -> Any:
    """A value in which something is another value, or missing."""
    if isinstance(value, dict) and value and depth < 6 and choose(8):
        name = list(value)[choose(len(value))]
        kept = dict(value)
        if choose(6) == 0:
            del kept[name]
        else:
            kept[name] = _mutated(value[name], choose, depth + 1)
        return kept
    if isinstance(value, list) and value and depth < 6 and choose(8):
        place = choose(len(value))
        return [*value[:place], _mutated(value[place], choose, depth + 1), *value[place + 1 :]]
    return copy.deepcopy(_JUNK[choose(len(_JUNK))])


def _body(choose: Callable[[int], int]) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "tiny", **_SHAPES[choose(len(_SHAPES))]}
    body.pop("extra_body", None)
    for _ in range(choose(3)):
        body = _mutated(body, choose)
        if not isinstance(body, dict):
            return {"input": body}
    if choose(3) == 0:
        body[_NAMES[choose(len(_NAMES))]] = _JUNK[choose(len(_JUNK))]
    if choose(3) == 0:
        body["stream"] = True
    return body


def _check(client: httpx.Client, body: dict[str, Any], path: str) -> int:
    """Send a body; returns the status."""
    response = client.post(
        path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    assert response.status_code not in _NEVER, (body, response.text)
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error["message"] and error["type"], body
    elif "event-stream" in response.headers["content-type"]:
        events = events_of(response.content)
        assert events[-1]["type"].split(".")[-1] in ("completed", "incomplete", "failed"), body
    else:
        assert response.json()["output"], body
    return response.status_code


@pytest.fixture
def strict(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    """The engine of the pair; what breaks it is answered with a 400."""
    fake = pair.fake
    chat = fake._chat

    async def refuse(request: web.Request, seen: Any) -> web.StreamResponse:
        try:
            return await chat(request, seen)
        except (KeyError, TypeError, ValueError, AttributeError, jinja2.TemplateError) as error:
            return web.Response(
                body=error_body(f"unreadable: {type(error).__name__}", "BadRequestError", None, 400),
                status=400,
                content_type="application/json",
            )

    monkeypatch.setattr(fake, "_chat", refuse)
    return fake


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bodies(client: httpx.Client, strict: FakeVllm, data: st.DataObject) -> None:
    body = _body(lambda count: data.draw(st.integers(0, count - 1)))
    path = data.draw(st.sampled_from(["/v1/responses", "/v1/responses", "/v1/responses/compact"]))
    _check(client, body, path)


@pytest.mark.parametrize("field", [b"metadata", b"tools", b"user", b"x"])
def test_bodies_that_are_not_utf8(client: httpx.Client, field: bytes) -> None:
    """Also in values that the response repeats, or that nobody reads."""
    body = b'{"model":"tiny","input":"Hi","%b":["\xff"]}' % field
    response = client.post("/v1/responses", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400 and "UTF-8" in response.json()["error"]["message"]


@pytest.mark.slow
def test_5000_bodies(client: httpx.Client, strict: FakeVllm) -> None:
    chance = random.Random(13)
    statuses: Counter[int] = Counter()
    for number in range(5000):
        path = "/v1/responses/compact" if number % 7 == 0 else "/v1/responses"
        statuses[_check(client, _body(chance.randrange), path)] += 1
        if number % 500 == 0:
            strict.requests.clear()
    # enough of both, or the bodies are not what clients send
    assert statuses[200] > 1000 and statuses[400] > 1000
