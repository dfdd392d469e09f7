"""What decides whether ids may be reused: each of these once let ids of one scope into another."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import Canned, FakeVllm, Reply, Variant
from tests.support.talk import CHAT, Message, Talk, user
from tests.support.tiny_model import END, TinyModel
from tests.support.utils import Pair, run_proxy, wait_until

Make = Callable[..., Talk]
SPLIT = (74, 71, 78, 78, 81, END)
_TOOLS = [{"type": "function", "function": {"name": "f", "description": "d"}}]


@pytest.mark.parametrize("name", ["add_generation_prompt", "finish_reason"])
@pytest.mark.parametrize(
    "change, reason", [({"tools": _TOOLS}, "tools_changed"), ({"model": "adapter"}, "model_changed")]
)
def test_template_kwargs_of_any_name_leave_tools_and_model_in_the_key(
    talk: Make, name: str, change: Message, reason: str
) -> None:
    made = talk(fields={"chat_template_kwargs": {name: True}})
    made.ask(reply=Reply(SPLIT))
    made.fields = {**made.fields, **change}
    answered = made.ask(user("more"))
    assert (answered.sent, answered.reason) == (None, reason)


@pytest.mark.parametrize("name", ["truncation", "chat_template"])
def test_template_kwargs_that_are_arguments_of_the_rendering_are_left_to_the_engine(
    talk: Make, name: str
) -> None:
    made = talk()
    made.ask(reply=Reply(SPLIT))
    made.pair.fake.canned[CHAT] = Canned(b'{"choices": []}', headers={"content-type": "application/json"})
    response = made.pair.client.post(
        CHAT, json={"messages": [*made.messages, user("more")], "chat_template_kwargs": {name: None}}
    )
    assert response.headers["x-prompt-source"] == "rendered"


@pytest.mark.parametrize("session", [{}, {"x-session-id": "identity"}])
def test_turn_with_given_ids_is_not_found_by_its_text(talk: Make, session: dict[str, str]) -> None:
    made = talk(headers=session)
    if session:
        made.headers = {"x-session-id": made.messages[0]["content"].replace(" ", "-")}
    made.ask(reply=Reply(SPLIT), kv_transfer_params={"prompt_token_ids": [5, 6]})
    answered = made.ask(user("more"))
    assert (answered.sent, answered.prompt["source"]) == (None, "rendered")


def test_turn_with_given_ids_is_not_found_by_an_empty_message(talk: Make) -> None:
    """The engine is given an empty message next to ids where the client gave none."""
    made = talk()
    response = made.pair.client.post(
        f"{CHAT}/tokens", json={"prompt_ids": [5, 6]}, headers={"x-session-id": "empty"}
    )
    answer = response.json()["choices"][0]["message"]
    made.messages, made.headers = [user(""), answer], {"x-session-id": "empty"}
    assert made.ask(user("more")).sent is None


def test_session_named_like_a_generated_one_belongs_to_the_client(talk: Make) -> None:
    """Whether a client named a session is not read from its spelling."""
    name = f"{7:028x}0000"
    made = talk(headers={"x-session-id": name})
    made.ask(reply=Reply(SPLIT))
    assert made.pair.client.get(f"/v1/sessions/{name}").json()["explicit"] is True
    copy = talk(messages=list(made.messages))
    assert copy.ask(user("more")).reason == "no_match"
    made.follow(user("more"))


# --- planning changes nothing in the request


def test_failover_to_an_engine_with_other_abilities_plans_anew(tiny_model: TinyModel) -> None:
    """The first cannot run stop strings on ids; that it could not must not be true of the second."""
    with (
        FakeVllm(tiny_model, Variant.SCALE_OUT) as first,
        FakeVllm(tiny_model) as second,
        run_proxy([first, second], store="memory:", watch_interval_s=60) as client,
    ):
        for engine in (first, second):
            engine.replies.extend([Reply(SPLIT)] * 2)
        messages = [user("Hi")]
        answer = client.post(CHAT, json={"messages": messages, "stop": ["x"]})
        messages += [answer.json()["choices"][0]["message"], user("more")]
        first.kill()
        body = {"messages": messages, "stop": ["x"]}
        sources = [client.post(CHAT, json=body).headers["x-prompt-source"] for _ in range(2)]
        assert sources == ["extended", "extended"]
        assert _prompts(client) == 3


def _prompts(client: Any) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("tokenproxy_prompts_total{"))


def test_rollout_in_use_is_not_evicted(tiny_model: TinyModel) -> None:
    """Others fill the store while its turn runs; its next turn still has its parent."""
    with (
        FakeVllm(tiny_model) as engine,
        run_proxy([engine], store="memory:", store_max_bytes=20_000) as client,
    ):
        pair = Pair(engine, client)
        made = Talk(pair, tiny_model)
        session = made.ask(reply=Reply(SPLIT)).session
        engine.replies.append(Reply((90, END), hold_at=0))
        messages = [*made.messages, user("more")]
        with _running(pair, messages) as response:
            for _ in range(40):
                client.post(CHAT, json={"messages": [user("other " * 50)]})
            engine.release()
            assert response().headers["x-prompt-source"] == "extended"
        turns = client.get(f"/v1/sessions/{session}").json()["turns"]
        assert [turn["parent"] for turn in turns] == [None, turns[0]["id"]]
        samples = client.get(f"/v1/sessions/{session}/samples").json()
        assert (len(samples["samples"]), samples["refused"]) == (1, [])


@contextmanager
def _running(pair: Pair, messages: list[Message]) -> Iterator[Callable[[], httpx.Response]]:
    """A request that runs in another thread while the block does; calling it gives its response."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: pair.client.post(CHAT, json={"messages": messages}))
        wait_until(lambda: pair.fake.running)
        yield future.result
