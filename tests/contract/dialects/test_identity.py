"""What decides whether ids may be reused: each of these once let ids of one scope into another."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.fake_vllm import Canned, FakeVllm, Reply
from tests.support.talk import CHAT, Message, Talk, appended_after, sent_ids, user
from tests.support.tiny_model import SPLIT, TinyModel
from tests.support.utils import EVERY_SPELLING, run_proxy, send_and_keep, wait_until

Make = Callable[..., Talk]
_TOOLS = [{"type": "function", "function": {"name": "f", "description": "d"}}]


@pytest.mark.parametrize("name", ["add_generation_prompt", "finish_reason"])
@pytest.mark.parametrize(
    "change, reason", [({"tools": _TOOLS}, "tools_changed"), ({"model": "adapter"}, "model_changed")]
)
def test_template_kwargs_of_any_name_stay_apart(talk: Make, name: str, change: Message, reason: str) -> None:
    made = talk(fields={"chat_template_kwargs": {name: True}})
    made.ask(reply=Reply(SPLIT))
    made.fields = {**made.fields, **change}
    answered = made.ask(user("more"))
    assert (answered.sent, answered.reason) == (None, reason)


@pytest.mark.parametrize("name", ["truncation", "chat_template"])
def test_template_kwargs_that_name_arguments_are_left_to_the_engine(talk: Make, name: str) -> None:
    made = talk()
    made.ask(reply=Reply(SPLIT))
    made.pair.fake.canned[CHAT] = Canned(b'{"choices": []}', headers={"content-type": "application/json"})
    response = made.pair.client.post(
        CHAT, json={"messages": [*made.messages, user("more")], "chat_template_kwargs": {name: None}}
    )
    assert response.headers["x-prompt-source"] == "rendered"


def test_turn_with_given_ids_is_not_found_by_its_text(talk: Make) -> None:
    made = talk()
    made.ask(reply=Reply(SPLIT), kv_transfer_params={"prompt_token_ids": [5, 6]})
    answered = made.ask(user("more"))
    assert (answered.sent, answered.prompt["source"]) == (None, "rendered")


def test_session_named_like_a_generated_one_belongs_to_the_client(talk: Make) -> None:
    """Whether a client named a session is not read from its spelling."""
    name = f"{7:028x}0000"
    made = talk(headers={"x-session-id": name})
    made.ask(reply=Reply(SPLIT))
    assert made.pair.client.get(f"/v1/sessions/{name}").json()["explicit"] is True
    copy = talk(messages=list(made.messages))
    assert copy.ask(user("more")).reason == "no_match"
    made.follow(user("more"))


def test_after_a_failure_another_replica_gets_the_same_prompt(tiny_model: TinyModel) -> None:
    with (
        FakeVllm(tiny_model) as first,
        FakeVllm(tiny_model) as second,
        run_proxy([first, second], store="memory:", watch_interval_s=60) as client,
    ):
        for engine in (first, second):
            engine.replies.append(Reply(SPLIT))
        messages = [user("Hi")]
        answer = client.post(CHAT, json={"messages": messages, "return_token_ids": True}).json()
        [choice] = answer["choices"]
        messages += [choice["message"], user("more")]
        served, other = (second, first) if first.replies else (first, second)
        served.kill()
        again = client.post(CHAT, json={"messages": messages})
        assert again.headers["x-prompt-source"] == "extended"
        before = [*answer["prompt_token_ids"], *choice["token_ids"]]
        assert sent_ids(other) == [*before, *appended_after(tiny_model, before, [user("more")])]


_TOKENS = f"{CHAT}/tokens"


def _with_ids(made: Talk, *new: Message, reply: Reply | None = None, append: bool = False) -> Any:
    """A turn on the token route, as verifiers sends it: ids that it made itself, and all messages."""
    script = reply or Reply(SPLIT)
    made.pair.fake.replies.append(script)
    appended = appended_after(made.model, made.ids, new)
    body: dict[str, Any] = {"prompt_ids": [*made.ids, *appended], "messages": [*made.messages, *new]}
    if append:
        body = {"prompt_ids": made.ids, "messages": made.messages, "append_messages": list(new)}
    response = made.pair.client.post(_TOKENS, json=body, headers=made.headers)
    assert response.status_code == 200, response.text
    made.pair.fake.replies.clear()
    sent = sent_ids(made.pair.fake)
    assert sent == [*made.ids, *appended]
    made.ids = [*sent, *script.ids]
    made.messages = [*made.messages, *new, response.json()["choices"][0]["message"]]
    return response


@EVERY_SPELLING
@pytest.mark.parametrize("append", [False, True])
def test_chat_turns_continue_turns_of_the_token_route(talk: Make, append: bool) -> None:
    made = talk()
    first = made.ask(reply=Reply(SPLIT))
    for _ in range(2):
        response = _with_ids(made, user("more"), append=append)
        assert response.headers["x-session-id"] == first.session
        assert made.follow(user("And?"), reply=Reply(SPLIT)).session == first.session
    turns = made.pair.client.get(f"/v1/sessions/{first.session}").json()["turns"]
    assert [turn["parent"] for turn in turns] == [None, *(turn["id"] for turn in turns[:-1])]


def test_ids_that_render_the_messages_are_proved(talk: Make) -> None:
    made = talk()
    made.pair.fake.replies.append(Reply(SPLIT))
    prompt = made.model.render(made.messages)
    answer = made.pair.client.post(_TOKENS, json={"prompt_ids": prompt, "messages": made.messages})
    made.ids = [*prompt, *SPLIT]
    made.messages.append(answer.json()["choices"][0]["message"])
    made.follow(user("more"))


def test_ids_that_are_not_those_of_the_messages_are_never_continued_by_their_text(talk: Make) -> None:
    made = talk()
    made.ask(reply=Reply(SPLIT))
    made.messages.append(user("more"))
    prompt = [*made.ids, 5, 6, 7]
    answer = made.pair.client.post(_TOKENS, json={"prompt_ids": prompt, "messages": made.messages})
    made.messages.append(answer.json()["choices"][0]["message"])
    answered = made.ask(user("And?"))
    assert answered.sent is None or answered.sent[: len(prompt)] != prompt


def test_members_of_a_group_have_as_many_samples_and_rewards(talk: Make) -> None:
    """No member names a session, all get equal texts and equal ids, and ask at the same time."""
    client, messages, sessions = talk().pair.client, talk().messages, list[str]()
    with ThreadPoolExecutor(8) as pool:
        for source in ("rendered", "extended", "extended"):
            body = {"messages": messages}
            answers = list(pool.map(lambda _: client.post(CHAT, json=body), range(24)))  # noqa: B023
            sessions = [answer.headers["x-session-id"] for answer in answers]
            assert len(set(sessions)) == 24
            assert {answer.headers["x-prompt-source"] for answer in answers} == {source}
            messages = [*messages, answers[0].json()["choices"][0]["message"], user("more")]
    for number, name in enumerate(sessions):
        reward = client.post(f"/v1/sessions/{name}/reward", json={"reward": float(number)})
        assert "warning" in reward.json()
        [sample] = client.get(f"/v1/sessions/{name}/samples").json()["samples"]
        assert (sample["reward"], len(sample["turns"]), sample["ambiguous"]) == (number, 3, True)


def test_what_was_claimed_for_a_client_that_left_is_free_again(talk: Make) -> None:
    """Two conversations with equal texts and ids: each is continued once."""
    one, two = talk(), talk()
    two.messages = list(one.messages)
    sessions = {made.ask(reply=Reply(SPLIT)).session for made in (one, two)}
    fake = one.pair.fake
    fake.replies.append(Reply(SPLIT, hold_at=0))
    body = json.dumps({"messages": [*one.messages, user("more")]}).encode()
    with send_and_keep(one.pair.client.base_url, CHAT, body):
        wait_until(lambda: fake.held)
    wait_until(lambda: fake.aborted)
    assert {made.follow(user("more")).session for made in (one, two)} == sessions


def test_a_session_may_be_named_while_its_first_turn_streams(talk: Make) -> None:
    made = talk()
    client, fake = made.pair.client, made.pair.fake
    fake.replies.append(Reply(SPLIT, hold_at=2))
    with client.stream("POST", CHAT, json={"messages": made.messages, "stream": True}) as response:
        headers = {"x-session-id": response.headers["x-session-id"]}
        assert client.post(CHAT, json={"messages": [user("Other")]}, headers=headers).status_code == 200
        fake.release()
        response.read()
    made.headers = headers
    made.messages.append({"role": "assistant", "content": made.model.decode(list(SPLIT))})
    assert made.ask(user("more")).prompt["source"] == "extended"
