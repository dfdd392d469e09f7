from typing import Any, ClassVar, cast

import pytest
from fastapi import FastAPI
from openai import OpenAI
from openai.types.chat import ChatCompletion

from proxy.demo.conversation import (
    SCRIPT,
    ChatRoute,
    Step,
    StockRoute,
    TokenRoute,
    common_prefix,
    converse,
    ids_of,
)
from proxy.demo.errors import ConversationError
from tests.support.quiet import quiet
from tests.support.utils import run_server


def completion(prompt_ids, token_ids, *, calls=(), cached=0, finish="stop"):
    """A chat completion as the SDK would parse it."""
    message: dict[str, Any] = {"role": "assistant", "content": None if calls else "text"}
    if calls:
        message["tool_calls"] = [
            {"id": f"call-{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ]
    return ChatCompletion.model_validate(
        {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "prompt_token_ids": prompt_ids,
            "choices": [{"index": 0, "finish_reason": finish, "message": message, "token_ids": token_ids}],
            "usage": {
                "prompt_tokens": len(prompt_ids or []),
                "completion_tokens": len(token_ids or []),
                "total_tokens": 0,
                "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
            },
        }
    )


class ScriptedRoute:
    """Returns the given completions in order; records its requests."""

    name = "scripted route"
    session: str | None = "scripted"

    def __init__(self, *completions):
        self._completions = iter(completions)
        self.requests = []

    def next_turn(self, new_messages, **options):
        self.requests.append((new_messages, options))
        return next(self._completions)


class RawResponse:
    """A response as the SDK gives it with its headers."""

    headers: ClassVar = {"x-session-id": "recorded-as"}

    def __init__(self, parsed):
        self._parsed = parsed

    def parse(self):
        return self._parsed


class RecordingClient:
    """A fake of the SDK's client: `post` for the token route, `create` for the chat routes."""

    def __init__(self, *responses):
        self._responses = iter(responses)
        self.sent = []
        self.chat = self
        self.completions = self
        self.with_raw_response = self
        self.headers = []

    def post(self, path, *, body, cast_to, options):
        assert (path, cast_to) == ("/chat/completions/tokens", ChatCompletion)
        self.sent.append(body)
        self.headers.append(options["headers"])
        return next(self._responses)

    def create(self, *, messages, **options):
        self.sent.append({"messages": list(messages)} | options)
        return RawResponse(next(self._responses))


@pytest.mark.parametrize(
    ("left", "right", "length"),
    [
        ([], [], 0),
        ([1], [], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2, 3], [1, 9, 3], 1),
        ([9, 2], [1, 2], 0),
        ([1, 2], [1, 2], 2),
    ],
)
def test_common_prefix(left, right, length):
    assert common_prefix(left, right) == length


def test_ids_are_counted_for_exact_and_drifted_turns():
    route = ScriptedRoute(
        completion([1, 2, 3], [4, 5]),
        completion([1, 2, 3, 4, 5, 6, 7], [8], cached=4, finish="length"),
        completion([1, 2, 3, 4, 5, 6, 7, 9, 10], [11], cached=None),
    )
    script = [Step("answer", "a"), Step("answer", "b"), Step("answer", "c")]
    result = converse(route, "m", script, progress=quiet)
    first, second, third = result.turns
    assert (first.exact, first.before, first.reused, first.appended, first.completion) == (None, 0, 0, 3, 2)
    assert (second.exact, second.before, second.reused, second.appended) == (True, 5, 5, 2)
    assert (second.cached, second.finish_reason) == (4, "length")
    assert (third.exact, third.before, third.reused, third.appended, third.cached) == (False, 8, 7, 2, None)
    assert (result.follow_ups, result.exact) == (2, 1)


def test_prompt_shorter_than_the_turn_before_is_not_exact():
    route = ScriptedRoute(completion([1, 2, 3], [4, 5]), completion([1, 2, 3, 4], [6]))
    result = converse(route, "m", [Step("answer", "a"), Step("answer", "b")], progress=quiet)
    assert result.turns[1].exact is False
    assert result.turns[1].appended == 0


def test_tool_results_are_sent_in_order_before_the_user_message():
    call = ("calculator", '{"a": 2, "operator": "*", "b": 3}')
    route = ScriptedRoute(completion([1], [2], calls=[call, call]), completion([1, 2, 3], [4]))
    result = converse(route, "m", [Step("tools", "a"), Step("answer", "b")], progress=quiet)
    assert result.turns[0].tool_calls == 2
    assert route.requests[1][0] == [
        {"role": "tool", "tool_call_id": "call-0", "content": '{"value": 6}'},
        {"role": "tool", "tool_call_id": "call-1", "content": '{"value": 6}'},
        {"role": "user", "content": "b"},
    ]


def test_turn_without_complete_tool_call_is_followed_by_a_user_message():
    route = ScriptedRoute(completion([1], [2], finish="length"), completion([1, 2, 3], [4]))
    converse(route, "m", [Step("tools", "a"), Step("answer", None)], progress=quiet)
    assert [message["role"] for message in route.requests[1][0]] == ["user"]


def test_sampling_options_of_both_kinds_of_steps():
    route = ScriptedRoute(completion([1], [2]), completion([1, 2, 3], [4]))
    converse(route, "m", [Step("tools", "a"), Step("answer", "b")], progress=quiet)
    first, second = (options for _, options in route.requests)
    assert (first["tool_choice"], second["tool_choice"]) == ("required", "auto")
    assert first["seed"] != second["seed"]
    assert first["temperature"] >= 1.0
    assert first["tools"] == second["tools"]


def test_script_has_follow_up_turns_of_both_kinds():
    assert len(SCRIPT) >= 7
    assert {step.kind for step in SCRIPT[1:]} == {"tools", "answer"}


def test_token_route_sends_all_ids_and_only_new_messages():
    client = RecordingClient(completion([1, 2], [3]), completion([1, 2, 3, 4], [5]))
    route = TokenRoute(cast(Any, client))
    route.next_turn([{"role": "user", "content": "a"}], model="m")
    route.next_turn([{"role": "user", "content": "b"}], model="m")
    assert client.sent == [
        {"model": "m", "messages": [{"role": "user", "content": "a"}]},
        {"model": "m", "prompt_ids": [1, 2, 3], "append_messages": [{"role": "user", "content": "b"}]},
    ]
    assert client.headers == [{"X-Session-ID": route.session}] * 2


@pytest.mark.parametrize("route_class", [ChatRoute, StockRoute])
def test_chat_routes_send_all_messages_unchanged(route_class):
    client = RecordingClient(completion([1, 2], [3], calls=[("get_weather", "{}")]), completion([1], [5]))
    route = route_class(cast(Any, client))
    route.next_turn([{"role": "user", "content": "a"}], model="m")
    route.next_turn([{"role": "tool", "tool_call_id": "call-0", "content": "{}"}], model="m")
    user, assistant, tool = client.sent[1]["messages"]
    assert (user["role"], tool["role"]) == ("user", "tool")
    assert assistant["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": "{}"}
    assert route.session == "recorded-as"
    for sent in client.sent:
        assert sent["extra_body"]["return_token_ids"] is True


def test_stock_route_stays_in_a_session_whose_turns_never_match():
    client = RecordingClient(completion([1, 2], [3]), completion([1], [5]))
    route = StockRoute(cast(Any, client))
    for text in "ab":
        route.next_turn([{"role": "user", "content": text}], model="m")
    assert len({sent["extra_headers"]["X-Session-ID"] for sent in client.sent}) == 1
    arguments = [sent["extra_body"]["chat_template_kwargs"] for sent in client.sent]
    assert arguments[0] != arguments[1]


def test_chat_route_names_no_session_and_no_template_arguments():
    client = RecordingClient(completion([1, 2], [3]))
    ChatRoute(cast(Any, client)).next_turn([{"role": "user", "content": "a"}], model="m")
    assert client.sent[0]["extra_body"] == {"return_token_ids": True}
    assert "extra_headers" not in client.sent[0]


@pytest.mark.parametrize(("prompt_ids", "token_ids"), [(None, [1]), ([1], None)])
def test_response_without_ids_is_an_error(prompt_ids, token_ids):
    with pytest.raises(ConversationError, match="token_ids"):
        ids_of(completion(prompt_ids, token_ids))


def test_error_of_a_server_without_the_route_names_the_command_to_start():
    with run_server(FastAPI()) as url:
        route = TokenRoute(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
        with pytest.raises(ConversationError, match="tokenproxy vllm"):
            converse(route, "m", [Step("answer", "a")], progress=quiet)
