"""Whose ids may be reused, and whose rollout a turn belongs to, on a real engine."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from proxy.demo.stack import EngineProcess
from tests.campaign.real_vllm.conftest import Served, run_proxy
from tests.campaign.real_vllm.plain import (
    CHAT,
    SESSIONS,
    TOKENS,
    TOOLS,
    Conversation,
    continues,
    forced,
    user,
)
from tokenization import ChatTokenizer

_MEMBERS = 40


@pytest.fixture
def http(server: Served) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


@pytest.fixture
def tokenizer(model: Path) -> ChatTokenizer:
    return ChatTokenizer.load(model)


def _talk(http: httpx.Client, **options: Any) -> Conversation:
    return Conversation(http, [user(f"Say something about {uuid4().hex}.")], {"max_tokens": 6, **options})


# --- identity


@pytest.mark.parametrize("name", ["add_generation_prompt", "finish_reason", "history"])
def test_template_kwargs_of_any_name_hide_no_change_of_tools(http: httpx.Client, name: str) -> None:
    talk = _talk(http, chat_template_kwargs={name: True})
    talk.ask()
    assert talk.ask(user("More."), tools=TOOLS, tool_choice="none").source == "rendered: tools_changed"


def test_turn_with_given_ids_is_not_found_by_its_text(http: httpx.Client) -> None:
    talk = _talk(http)
    talk.ask(kv_transfer_params={"prompt_token_ids": [1, 4093, 198]})
    assert talk.ask(user("More.")).source.startswith("rendered")


def test_turn_with_given_ids_is_not_found_by_an_empty_message(http: httpx.Client) -> None:
    headers = {"x-session-id": uuid4().hex}
    body = {"prompt_ids": [1, 4093, 198], "max_tokens": 4}
    answer = http.post(TOKENS, json=body, headers=headers).json()["choices"][0]["message"]["content"]
    messages = [user(""), {"role": "assistant", "content": answer}]
    talk = Conversation(http, messages, {"max_tokens": 4}, headers)
    assert talk.ask(user("More.")).source.startswith("rendered")


def test_a_turn_with_a_truncated_prompt_is_not_continued(http: httpx.Client) -> None:
    talk = _talk(http)
    talk.ask(truncate_prompt_tokens=16)
    assert talk.ask(user("More.")).source.startswith("rendered")


def test_session_with_any_spelling_belongs_to_the_client(http: httpx.Client) -> None:
    name = uuid4().hex
    talk = _talk(http)
    talk.headers = {"x-session-id": name}
    first = talk.ask()
    assert http.get(f"{SESSIONS}/{name}").json()["explicit"] is True
    outside = talk.copy()
    outside.headers = {}
    assert outside.ask(user("More.")).source == "rendered: no_match"
    assert continues(talk.ask(user("More.")), first)


# --- whose rollout


def test_equal_rollouts_stay_apart_and_keep_their_rewards(http: httpx.Client) -> None:
    """Members of a group with equal texts and equal ids, without sessions, their turns at once."""
    question = [user(f"Say something about {uuid4().hex}.")]
    members = [Conversation(http, list(question), forced(260)) for _ in range(_MEMBERS)]
    with ThreadPoolExecutor(8) as pool:
        first = list(pool.map(lambda member: member.ask(), members))
        second = list(pool.map(lambda member: member.ask(user("More.")), members))
    sessions = [turn.session for turn in first]
    assert len(set(sessions)) == _MEMBERS
    assert len({tuple(turn.ids) for turn in first}) == 1
    assert {turn.source for turn in second} == {"extended"}
    assert sorted(turn.session for turn in second) == sorted(sessions)
    assert {turn.response.headers["x-prompt-candidates"] for turn in second} == {str(_MEMBERS)}
    for number, name in enumerate(sessions):
        assert "warning" in http.post(f"{SESSIONS}/{name}/reward", json={"reward": float(number)}).json()
    for number, name in enumerate(sessions):
        [sample] = http.get(f"{SESSIONS}/{name}/samples").json()["samples"]
        assert (sample["reward"], len(sample["turns"]), sample["ambiguous"]) == (float(number), 2, True)


def test_equal_text_of_other_ids_is_ambiguous(http: httpx.Client, tokenizer: ChatTokenizer) -> None:
    """`the` as one token and as two: nothing decides which was meant, so the engine renders."""
    whole, start = tokenizer.encode("the")[0], tokenizer.encode("t")[0]
    talk = _talk(http)
    other = talk.copy()
    choice: dict[str, Any] = {"structured_outputs": {"choice": ["the"]}, "temperature": 0, "max_tokens": 4}
    first = talk.ask(**choice, logit_bias={str(whole): 100.0})
    second = other.ask(**choice, logit_bias={str(start): 50.0})
    assert (talk.messages, first.ids == second.ids) == (other.messages, False)
    assert talk.ask(user("More.")).source == "rendered: ambiguous"


# --- the token route, samples, retries


def test_the_token_route_and_the_chat_route_share_a_rollout(http: httpx.Client) -> None:
    talk = _talk(http)
    first = talk.ask()
    body = {"messages": talk.messages, "prompt_ids": [*first.prompt_ids, *first.ids], "max_tokens": 6}
    answer = http.post(TOKENS, json={**body, "append_messages": [user("More.")]})
    assert answer.headers["x-session-id"] == first.session
    talk.messages += [user("More."), answer.json()["choices"][0]["message"]]
    second = answer.json()
    third = talk.ask(user("And then?"))
    ids = [*second["prompt_token_ids"], *second["choices"][0]["token_ids"]]
    assert (third.source, third.prompt_ids[: len(ids)]) == ("extended", ids)
    assert len(http.get(f"{SESSIONS}/{first.session}").json()["turns"]) == 3


def test_recording_of_the_token_route_can_be_turned_off(
    engines: dict[str, EngineProcess], tmp_path: Path
) -> None:
    flags = ("--no-record-token-route", "--store", f"sqlite:///{tmp_path}/turns/rollouts.db")
    with run_proxy(engines["stock"].url, *flags) as url, httpx.Client(base_url=url, timeout=120) as http:
        body = {"prompt_ids": [1, 4093, 198], "max_tokens": 2}
        answer = http.post(TOKENS, json=body, headers={"x-session-id": "s"})
        assert answer.status_code == 200
        assert "x-turn-id" not in answer.headers
        assert http.get(f"{SESSIONS}/s").status_code == 404
        http.post(CHAT, json={"messages": [user("Hi")], "max_tokens": 2})
    # conversations are private: only the owner may read the files
    assert (tmp_path / "turns").stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "turns").iterdir()} == {0o600}


def test_a_shared_turn_is_trained_once_with_the_tools_of_the_last_request(http: httpx.Client) -> None:
    talk = _talk(http, tools=TOOLS, tool_choice="none")
    first = talk.ask()
    fork = talk.copy()
    talk.ask(user("More."))
    rewarded = fork.ask(user("Less."))
    reward = {"rewards": {rewarded.response.headers["x-turn-id"]: 1.0}}
    assert http.post(f"{SESSIONS}/{first.session}/reward", json=reward).status_code == 200
    samples = http.get(f"{SESSIONS}/{first.session}/samples").json()["samples"]
    trained = {sample["leaf"]: [span["trained"] for span in sample["turns"]] for sample in samples}
    assert trained[rewarded.response.headers["x-turn-id"]] == [True, True]
    assert sorted(trained.values()) == [[False, True], [True, True]]
    assert all(sample["tools"] == TOOLS for sample in samples)


def test_samples_tell_which_log_probabilities_they_have(http: httpx.Client) -> None:
    first = _talk(http).ask()
    [sample] = http.get(f"{SESSIONS}/{first.session}/samples").json()["samples"]
    assert all(value is not None for value in sample["logprobs"][-len(first.ids) :])
    assert "logprobs_mode" in sample


def test_choices_of_one_request_are_two_samples(http: httpx.Client) -> None:
    talk = _talk(http, n=2, temperature=1.0)
    session = talk.ask().session
    samples = http.get(f"{SESSIONS}/{session}/samples").json()["samples"]
    assert len(samples) == 2


def test_retries_by_key_and_by_count(http: httpx.Client) -> None:
    """A key is answered once on each path; a count means a retry only within a session."""
    body = {"messages": [user(f"Say {uuid4().hex}.")], "max_tokens": 4}
    key = {"idempotency-key": uuid4().hex}
    first, again = (http.post(CHAT, json=body, headers=key) for _ in range(2))
    assert (again.headers["x-request-replayed"], again.content) == ("true", first.content)
    assert first.json()["choices"][0].get("token_ids") is None
    assert http.post(TOKENS, json=body, headers=key).status_code == 400
    count = {"x-stainless-retry-count": "1"}
    turns = [http.post(CHAT, json=body, headers=count) for _ in range(2)]
    assert len({turn.headers["x-turn-id"] for turn in turns}) == 2
    count["x-session-id"] = uuid4().hex
    turns = [http.post(CHAT, json=body, headers=count) for _ in range(2)]
    assert len({turn.headers["x-turn-id"] for turn in turns}) == 1


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions/", "/chat/completions/"])
def test_a_route_answers_under_all_of_its_paths(http: httpx.Client, path: str) -> None:
    talk = _talk(http)
    first = talk.ask(path=path)
    assert continues(talk.ask(user("More."), path=path), first)


def test_metadata_is_bounded(http: httpx.Client) -> None:
    answer = http.post(SESSIONS, json={"id": uuid4().hex, "metadata": {"text": "x" * 70_000}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")
