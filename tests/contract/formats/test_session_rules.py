"""Limits and policies of sessions, as the SDKs of OpenAI and Anthropic meet them."""

import secrets
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import CHAT
from tests.support.tiny_model import SPLIT
from tests.support.utils import run_proxy

Said = tuple[str, str | None]
"""Text and finish reason."""
_SCHEMA: Any = {"type": "object", "properties": {}}


def _chat(client: httpx.Client, base: str, stream: bool) -> Said:
    sdk = openai.OpenAI(base_url=f"{client.base_url}{base}/v1", api_key="none", max_retries=0)
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}]
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    if stream:
        with sdk.chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
            completion: Any = events.get_final_completion()
    else:
        completion = sdk.chat.completions.create(**asked)
    [choice] = completion.choices
    assert not choice.message.tool_calls and completion.usage is not None
    return choice.message.content, choice.finish_reason


def _messages(client: httpx.Client, base: str, stream: bool) -> Said:
    sdk = anthropic.Anthropic(base_url=f"{client.base_url}{base}", api_key="x", max_retries=0)
    tools: Any = [{"name": "f", "input_schema": _SCHEMA}]
    asked: Any = {"model": "tiny", "max_tokens": 99, "messages": [{"role": "user", "content": "Hi"}]}
    if stream:
        with sdk.messages.stream(**asked, tools=tools) as events:
            message = events.get_final_message()
    else:
        message = sdk.messages.create(**asked, tools=tools)
    [block] = message.content
    assert isinstance(block, anthropic.types.TextBlock)
    return block.text, message.stop_reason


def _responses(client: httpx.Client, base: str, stream: bool) -> Said:
    sdk = openai.OpenAI(base_url=f"{client.base_url}{base}/v1", api_key="none", max_retries=0)
    tools: Any = [{"type": "function", "name": "f", "parameters": _SCHEMA, "strict": False}]
    asked: Any = {"model": "tiny", "input": "Hi", "tools": tools}
    if stream:
        with sdk.responses.stream(**asked) as events:
            response: Any = events.get_final_response()
    else:
        response = sdk.responses.create(**asked)
    assert [item.type for item in response.output] == ["message"]
    assert sdk.responses.retrieve(response.id).output_text == response.output_text
    return response.output_text, response.status


_SDKS = {"chat": _chat, "messages": _messages, "responses": _responses}
_ENDED = {"chat": "stop", "messages": "end_turn", "responses": "completed"}
each_sdk = pytest.mark.parametrize("name", _SDKS)
every_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture
def session(client: httpx.Client) -> Callable[..., str]:
    """Makes a session; returns its name."""

    def make(**described: Any) -> str:
        made = client.post("/v1/sessions", json=described)
        assert made.status_code == 201, made.text
        return str(made.json()["id"])

    return make


@pytest.mark.parametrize(("limit", "most"), [("turns", 1), ("sampled_ids", len(SPLIT)), ("seconds", 0)])
@every_way
@each_sdk
def test_a_limit_ends_a_program_with_a_final_message(
    client: httpx.Client,
    fake: FakeVllm,
    session: Callable[..., str],
    name: str,
    stream: bool,
    limit: str,
    most: int,
) -> None:
    made = session(limits={limit: most})
    fake.replies.append(Reply(SPLIT))
    first, last, again = (_SDKS[name](client, f"/sessions/{made}", stream) for _ in range(3))
    assert first == ("hello", _ENDED[name])
    assert last == again == (f"The session has reached its limit ({limit}): this answer ends it.", first[1])
    assert len(fake.generations()) == 1
    recorded = client.get(f"/v1/sessions/{made}").json()
    assert (recorded["turn_count"], recorded["sampled_ids"]) == (1, len(SPLIT))
    assert len(client.get(f"/v1/sessions/{made}/samples").json()["samples"]) == 1


@every_way
@each_sdk
def test_a_policy_is_enforced_or_noted(
    client: httpx.Client, fake: FakeVllm, session: Callable[..., str], name: str, stream: bool
) -> None:
    policy = {"temperature": 0.5, "min_p": 0.25}
    for mode, noted in (("enforce", []), ("note", ["min_p"])):
        made = session(policy={**policy, "mode": mode}, overrides={"temperature": 0.5, "min_p": 0.125})
        _SDKS[name](client, f"/sessions/{made}", stream)
        sent = fake.generations()[-1].json
        assert (sent["temperature"], sent["min_p"]) == (0.5, 0.125 if noted else 0.25)
        [turn] = client.get(f"/v1/sessions/{made}").json()["turns"]
        assert (turn["off_policy"], turn["temperature"]) == (noted, 0.5)


def test_a_parameter_that_a_request_leaves_to_the_engine_is_off_policy(
    client: httpx.Client, fake: FakeVllm, session: Callable[..., str]
) -> None:
    """The engine's own default may be anything; a default of the session is known."""
    policy = {"mode": "note", "temperature": 1, "top_k": -1}
    for defaults, noted in (({}, ["temperature", "top_k"]), ({"temperature": 1.0, "top_k": -1}, [])):
        made = session(policy=policy, defaults=defaults)
        _chat(client, f"/sessions/{made}", stream=False)
        [turn] = client.get(f"/v1/sessions/{made}").json()["turns"]
        assert turn["off_policy"] == noted


def test_turns_off_policy_are_left_out(client: httpx.Client, session: Callable[..., str]) -> None:
    """The second turn continues the first, which is in its sample with a mask of 0."""
    made = session(policy={"mode": "note", "temperature": 1}, metadata={"run": secrets.token_hex(6)})
    headers, messages = {"x-session-id": made}, [{"role": "user", "content": "Hi"}]
    for temperature in (0.5, 1.0, 0.5):
        body = {"messages": messages, "temperature": temperature}
        said = client.post(CHAT, json=body, headers=headers).json()["choices"][0]["message"]
        messages = [*messages, said, {"role": "user", "content": "more"}]
    client.post(f"/v1/sessions/{made}/reward", json={"reward": 1.0})
    run = {"metadata": f"run={client.get(f'/v1/sessions/{made}').json()['metadata']['run']}"}
    for path, query in ((f"/v1/sessions/{made}/samples", {}), ("/v1/samples", run)):
        for on_policy, trained in (("false", [True, True, True]), ("true", [False, True])):
            found = client.get(path, params={**query, "on_policy": on_policy}).json()
            [sample] = (found if "samples" in found else found["data"][0])["samples"]
            assert [turn["trained"] for turn in sample["turns"]] == trained
            assert [turn["off_policy"] for turn in sample["turns"]][:2] == [["temperature"], []]
    assert client.get("/v1/samples", params={"on_policy": "yes"}).json()["error"]["param"] == "on_policy"


def test_a_retry_of_the_last_turn_gets_its_answer(client: httpx.Client, session: Callable[..., str]) -> None:
    """The first attempt was recorded and reached the limit; its answer was lost."""
    made, key = session(limits={"turns": 1}), secrets.token_hex(8)
    headers = {"x-session-id": made, "idempotency-key": key}
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    first, again = (client.post(CHAT, json=body, headers=headers) for _ in range(2))
    assert (again.content, again.headers["x-request-replayed"]) == (first.content, "true")
    assert "x-session-limit" not in again.headers


def test_rules_change_with_the_session(client: httpx.Client, session: Callable[..., str]) -> None:
    """A program that runs is ended at once with a limit of 0, and goes on when it is raised."""
    made = session(limits={"turns": 0})
    answers = []
    for limits in ({"turns": 0}, {"turns": None}, {}):
        saved = client.post("/v1/sessions", json={"id": made, "limits": limits}).json()
        assert saved["limits"] == limits
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        answers.append(client.post(CHAT, json=body, headers={"x-session-id": made}))
    assert [answer.headers.get("x-session-limit") for answer in answers] == ["turns", None, None]


@pytest.mark.parametrize(
    ("described", "param"),
    [
        ({"limits": 5}, "limits"),
        ({"limits": {"turns": -1}}, "limits.turns"),
        ({"limits": {"sampled_ids": 1.5}}, "limits.sampled_ids"),
        ({"limits": {"seconds": "1"}}, "limits.seconds"),
        ({"limits": {"tokens": 1}}, "limits.tokens"),
        ({"policy": {"mode": "force"}}, "policy.mode"),
        ({"policy": {"temperature": None}}, "policy.temperature"),
        ({"policy": {"top_p": 0}}, "policy.top_p"),
        ({"policy": {"repetition_penalty": 0}}, "policy.repetition_penalty"),
        ({"policy": {"seed": 1}}, "policy.seed"),
    ],
)
def test_bad_rules_are_refused(client: httpx.Client, described: dict[str, Any], param: str) -> None:
    refused = client.post("/v1/sessions", json=described)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_proxies_with_one_store_count_together(engine: FakeVllm, shared_url: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    with run_proxy([engine], store=shared_url) as one, run_proxy([engine], store=shared_url) as two:
        limits = {"turns": 3, "sampled_ids": 1000, "seconds": 3600}
        one.post("/v1/sessions", json={"id": "s", "limits": limits}).raise_for_status()
        answers = [each.post(CHAT, json=body, headers={"x-session-id": "s"}) for each in (one, two) * 2]
    assert [answer.headers.get("x-session-limit") for answer in answers] == [None, None, None, "turns"]
