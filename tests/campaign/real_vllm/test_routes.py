"""What the acceptance tests leave out: the generate route behind every format, and unusual requests."""

from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.acceptance.conftest import Server
from tests.acceptance.formats import CHAT_TOOL, FORMATS, TURNS, Chat
from tests.campaign.real_vllm.conftest import wait_ready
from tests.support.recorded import record_of
from tests.support.talk import CHAT, user
from tests.support.utils import run_app
from tokenproxy.engine.token_in import GenerateTokenIn
from tokenproxy.settings import Settings
from tokenproxy.web.keys import KeyScope, samples_unrecorded, scope_of_engine_route
from tokenproxy.web.routes import all_routes

_CALL: dict[str, Any] = {"tools": [CHAT_TOOL], "tool_choice": "required", "max_tokens": 60}
_STOP: dict[str, Any] = {"stop": ["a", "e"], "max_tokens": 40}
UNUSUAL: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True, "top_logprobs": 3},
    "one_token": {"max_tokens": 1},
    "stop_string": _STOP,
    "stop_string_kept": {**_STOP, "include_stop_str_in_output": True},
    "call_cut_short": {**_CALL, "max_tokens": 12},
    "named_call": {**_CALL, "tool_choice": {"type": "function", "function": {"name": "look"}}},
    "two_choices_with_calls": {**_CALL, "n": 2},
    "hidden_reasoning": {"include_reasoning": False},
}


@pytest.fixture(scope="module")
def by_generate(servers: Mapping[str, Server]) -> Iterator[httpx.Client]:
    """A proxy that finds no ids in vLLM's chat route, and so sends them by its generate route."""

    settings = Settings(upstreams=[servers["in front"].engine.url], store="memory:")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokenproxy.engine.discovery.ChatTokenIn", GenerateTokenIn)
        with run_app(settings) as client, httpx.Client(base_url=client.base_url, timeout=280) as http:
            wait_ready(str(http.base_url))
            yield http


@pytest.mark.parametrize("name", FORMATS)
def test_every_follow_up_is_exact_by_the_generate_route(by_generate: httpx.Client, name: str) -> None:
    conversation = FORMATS[name](f"generate-{uuid4().hex}")
    for _ in range(TURNS):
        conversation.ask(by_generate)
    record_of(by_generate, conversation.session(), TURNS).check_exact()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_requests_are_recorded_and_continued(server: Server, name: str, stream: bool) -> None:
    """A turn with some options, and one after its first choice; all evidence of both is recorded."""
    options, session = UNUSUAL[name], f"unusual-{uuid4().hex}"
    headers = {"x-session-id": session}
    chat = Chat(session)
    chat.messages = [user(f"Look at {session}, please.")]
    body = {"messages": chat.messages, "max_tokens": 12, **options, "stream": stream}
    response = server.http.post(CHAT, json=body, headers=headers)
    assert response.status_code == 200, response.text
    count = options.get("n", 1)
    sampled = record_of(server.http, session, count).turns
    assert len(sampled) == count
    for turn in sampled:
        assert (turn["problem"], len(turn["logprobs"])) == (None, turn["completion_tokens"])
    chat.messages.append(sampled[0]["message"])
    tools = {"tools": [CHAT_TOOL], "tool_choice": "none"} if "tools" in options else {}
    asked = {"messages": [*chat.messages, *chat.new_messages(1)], "max_tokens": 6, **tools}
    after = server.http.post(CHAT, json=asked, headers=headers)
    assert after.headers["x-prompt-source"] == "extended", after.text
    *_, last = record_of(server.http, session, count + 1).turns
    assert (last["parent"], last["problem"]) == (sampled[0]["id"], None)


_UNRECORDED = {
    "/cohere/v2/chat",
    "/invocations",
    "/v1/chat/completions/batch",
    "/v1/responses/{response_id}/cancel",
    "/v1/systemone",
}
"""Inference routes that the proxy refuses where it has keys. A new one that samples nothing goes on the other
list, `_SAMPLE_NOTHING`."""


def test_every_route_of_the_engine_has_a_scope(servers: Mapping[str, Server]) -> None:
    """What vLLM serves today: the development routes are all among those that need `admin`."""
    paths = httpx.get(f"{servers['in front'].engine.url}/openapi.json", timeout=60).json()["paths"]
    admin = {path for path in paths if scope_of_engine_route(path) is KeyScope.ADMIN}
    assert {"/pause", "/resume", "/collective_rpc", "/update_weights", "/server_info", "/sleep"} <= admin
    assert {path for path in paths if scope_of_engine_route(path) is KeyScope.TURNS} >= {"/v1/models"}
    inference = {path for path in paths if scope_of_engine_route(path) is KeyScope.INFERENCE}
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"} <= inference
    own = {route.path for route in all_routes()}
    unrecorded = {path for path in inference - own if samples_unrecorded(path)}
    assert unrecorded <= _UNRECORDED, unrecorded
    tools = ("/tokenize", "/detokenize", "/tokenizer_info", "/invocations", "/pooling", "/score", "/rerank")
    others = (*tools, "/classify", "/generative_scoring")
    beginnings = ("/v1/", "/v2/", "/cohere/", "/inference/")
    assert all(path.startswith(beginnings) or path in others for path in inference), inference
