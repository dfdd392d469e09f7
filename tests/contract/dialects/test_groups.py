"""Groups of rollouts that begin alike: each keeps its own tree, and its own reward."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import CHAT, Message, Talk, user
from tests.support.tiny_model import END, TinyModel
from tests.support.utils import Pair, run_proxy

SPLIT = (74, 71, 78, 78, 81, END)
_SESSIONS = "/v1/sessions"


@pytest.fixture(params=["memory", "sqlite", "two proxies"])
def pairs_of(request: pytest.FixtureRequest, tiny_model: TinyModel, tmp_path: Path) -> Iterator[list[Pair]]:
    """One proxy, or two with one store."""
    store = "memory:" if request.param == "memory" else f"sqlite://{tmp_path}/turns.db"
    with FakeVllm(tiny_model) as engine:
        if request.param == "two proxies":
            with run_proxy([engine], store=store) as one, run_proxy([engine], store=store) as two:
                yield [Pair(engine, one), Pair(engine, two)]
        else:
            with run_proxy([engine], store=store) as client:
                yield [Pair(engine, client)]


def _ask(pair: Pair, messages: list[Message]) -> tuple[str, str, Message]:
    """Session, source and message of one turn."""
    answer = pair.client.post(CHAT, json={"messages": messages})
    assert answer.status_code == 200, answer.text
    message: Message = answer.json()["choices"][0]["message"]
    return answer.headers["x-session-id"], answer.headers["x-prompt-source"], message


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("size, turns", [(1000, 2), (50, 5)])
def test_members_with_equal_answers_have_as_many_samples_and_rewards(
    pairs_of: list[Pair], size: int, turns: int
) -> None:
    """No member names a session, all get equal texts and equal ids; the turns of all members interleave."""

    def turn(number: int, messages: list[Message]) -> tuple[str, str, Message]:
        return _ask(pairs_of[number % len(pairs_of)], messages)

    messages, sessions = [user("Hi")], list[str]()
    with ThreadPoolExecutor(16) as pool:
        for index in range(turns):
            answers = list(pool.map(lambda n: turn(n, messages), range(size)))  # noqa: B023
            sessions = [session for session, _, _ in answers]
            assert len(set(sessions)) == size
            assert {source for _, source, _ in answers} == {"extended" if index else "rendered"}
            messages = [*messages, answers[0][2], user("more")]
        client = pairs_of[0].client

        def reward(number: int) -> bool:
            body = {"reward": float(number)}
            return "warning" in client.post(f"{_SESSIONS}/{sessions[number]}/reward", json=body).json()

        assert all(pool.map(reward, range(size)))
        samples = list(
            pool.map(lambda name: client.get(f"{_SESSIONS}/{name}/samples").json()["samples"], sessions)
        )
    assert [len(each) for each in samples] == [1] * size
    assert [each[0]["reward"] for each in samples] == [float(number) for number in range(size)]
    assert {len(each[0]["turns"]) for each in samples} == {turns}
    assert all(each[0]["ambiguous"] for each in samples)


def test_two_rollouts_with_equal_text_and_ids_stay_two_trees(talk: Callable[..., Talk]) -> None:
    one, two = talk(), talk()
    two.messages = list(one.messages)
    sessions = {made.ask(reply=Reply(SPLIT)).session for made in (one, two)}
    assert len(sessions) == 2
    continued = {made.follow(user("more"), reply=Reply(SPLIT)).session for made in (one, two)}
    assert continued == sessions
    for made in (one, two):
        made.follow(user("And?"))
    for name in sessions:
        turns = one.pair.client.get(f"{_SESSIONS}/{name}").json()["turns"]
        assert [turn["parent"] for turn in turns] == [None, turns[0]["id"], turns[1]["id"]]


def test_third_continuation_of_two_equal_rollouts_reuses_the_ids_in_a_rollout_of_its_own(
    talk: Callable[..., Talk],
) -> None:
    one, two = talk(), talk()
    two.messages = list(one.messages)
    sessions = {made.ask(reply=Reply(SPLIT)).session for made in (one, two)}
    third = talk()
    third.messages, third.ids = list(one.messages), list(one.ids)
    for made in (one, two):
        made.follow(user("more"))
    answered = third.follow(user("other"))
    assert answered.session not in sessions
    third.follow(user("more"))


def test_retry_after_a_failure_continues_the_same_rollout(talk: Callable[..., Talk]) -> None:
    """What was claimed for a request that failed is free again."""
    one, two = talk(), talk()
    two.messages = list(one.messages)
    sessions = {made.ask(reply=Reply(SPLIT)).session for made in (one, two)}
    one.pair.fake.replies.append(Reply(break_at=0, how="head"))
    body = {"messages": [*one.messages, user("more")]}
    assert one.pair.client.post(CHAT, json=body).status_code == 502
    assert {made.follow(user("more")).session for made in (one, two)} == sessions


def test_reward_of_an_unambiguous_rollout_has_no_warning(talk: Callable[..., Talk]) -> None:
    made = talk()
    session = made.ask(reply=Reply(SPLIT)).session
    made.follow(user("more"))
    answer = made.pair.client.post(f"{_SESSIONS}/{session}/reward", json={"reward": 1.0})
    assert "warning" not in answer.json()
