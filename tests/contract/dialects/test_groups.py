"""Groups of rollouts that begin alike: each keeps its own tree; nothing is guessed or lost."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.support.fake_vllm import Reply
from tests.support.talk import CHAT, Talk, user
from tests.support.tiny_model import END
from tests.support.utils import send_and_keep, wait_until

Make = Callable[..., Talk]
SPLIT = (74, 71, 78, 78, 81, END)
_SAME = {"content": "same"}


def _twins(talk: Make) -> tuple[Talk, Talk, set[str]]:
    """Two conversations with equal texts and ids, and their sessions."""
    one, two = talk(), talk()
    two.messages = list(one.messages)
    sessions = {made.ask(reply=Reply(SPLIT)).session for made in (one, two)}
    assert len(sessions) == 2
    return one, two, sessions


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
        body = {"reward": float(number)}
        assert "warning" in client.post(f"/v1/sessions/{name}/reward", json=body).json()
        [sample] = client.get(f"/v1/sessions/{name}/samples").json()["samples"]
        assert (sample["reward"], len(sample["turns"]), sample["ambiguous"]) == (number, 3, True)


def test_third_continuation_of_two_equal_rollouts_is_a_rollout_of_its_own(talk: Make) -> None:
    one, two, sessions = _twins(talk)
    third = talk()
    third.messages, third.ids = list(one.messages), list(one.ids)
    assert {made.follow(user("more")).session for made in (one, two)} == sessions
    assert third.follow(user("other")).session not in sessions
    third.follow(user("more"))
    for name in sessions:
        turns = one.pair.client.get(f"/v1/sessions/{name}").json()["turns"]
        assert [turn["parent"] for turn in turns] == [None, turns[0]["id"]]


def test_what_was_claimed_for_a_request_that_failed_is_free_again(talk: Make) -> None:
    one, two, sessions = _twins(talk)
    one.pair.fake.replies.append(Reply(break_at=0, how="head"))
    body = {"messages": [*one.messages, user("more")]}
    assert one.pair.client.post(CHAT, json=body).status_code == 502
    assert {made.follow(user("more")).session for made in (one, two)} == sessions


def test_what_was_claimed_for_a_client_that_left_is_free_again(talk: Make) -> None:
    one, two, sessions = _twins(talk)
    fake = one.pair.fake
    fake.replies.append(Reply(SPLIT, hold_at=0))
    body = json.dumps({"messages": [*one.messages, user("more")]}).encode()
    with send_and_keep(one.pair.client.base_url, CHAT, body):
        wait_until(lambda: fake.held)
    wait_until(lambda: fake.aborted)
    assert {made.follow(user("more")).session for made in (one, two)} == sessions


def test_reward_of_an_unambiguous_rollout_has_no_warning(talk: Make) -> None:
    made = talk()
    session = made.ask(reply=Reply(SPLIT)).session
    made.follow(user("more"))
    answer = made.pair.client.post(f"/v1/sessions/{session}/reward", json={"reward": 1.0})
    assert "warning" not in answer.json()


@pytest.mark.parametrize("others", [1, 20])
def test_choices_with_equal_text_are_ambiguous_among_any_number_of_others(talk: Make, others: int) -> None:
    made = talk()
    question = list(made.messages)
    first = made.ask(
        reply=Reply((80, 81, END), message=_SAME, others=(Reply((90, END), message=_SAME),)), n=2
    )
    for number in range(others):
        talk(messages=list(question)).ask(reply=Reply((100 + number, END), message=_SAME))
    made.headers = {"x-session-id": first.session}
    assert made.ask(user("more")).reason == "ambiguous"


@pytest.mark.parametrize("silent", [1, 20])
def test_turns_without_ids_do_not_hide_other_candidates(talk: Make, silent: int) -> None:
    made = talk()
    question = list(made.messages)
    replies = [Reply((80 + number, END), message=_SAME) for number in range(2 + silent)]
    for number, reply in enumerate(replies):
        made = talk(messages=list(question))
        made.ask(reply=reply if number < 2 else replace(reply, silent=("ids",)))
    assert made.ask(user("more")).reason == "ambiguous"


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
