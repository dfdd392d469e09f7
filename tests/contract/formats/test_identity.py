"""What decides whether ids may be reused: each of these once let ids of one scope into another."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.fake_vllm import Canned, Reply
from tests.support.talk import CHAT, Message, Talk, appended_after, sent_ids, user
from tests.support.tiny_model import SPLIT
from tests.support.utils import EVERY_SPELLING

Make = Callable[..., Talk]


def test_template_kwargs_that_name_arguments_are_left_to_the_engine(talk: Make) -> None:
    made = talk()
    made.ask(reply=Reply(SPLIT))
    made.pair.fake.canned[CHAT] = Canned(b'{"choices": []}', headers={"content-type": "application/json"})
    body = {"messages": [*made.messages, user("more")], "chat_template_kwargs": {"truncation": None}}
    assert made.pair.client.post(CHAT, json=body).headers["x-prompt-source"] == "rendered"


def test_turn_with_given_ids_is_not_found_by_its_text(talk: Make) -> None:
    made = talk()
    made.ask(reply=Reply(SPLIT), kv_transfer_params={"prompt_token_ids": [5, 6]})
    answered = made.ask(user("more"))
    assert (answered.sent, answered.prompt["source"]) == (None, "rendered")


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
    for name in sessions:
        assert "warning" in client.post(f"/v1/sessions/{name}/reward", json={"reward": 1.0}).json()
        [sample] = client.get(f"/v1/sessions/{name}/samples").json()["samples"]
        assert (len(sample["turns"]), sample["ambiguous"]) == (3, True)


_PREFILL = {"continue_final_message": True, "add_generation_prompt": False}
_SAID = {"role": "assistant", "content": "there, "}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", ["joined", "stripped", "parts"])
def test_turn_that_continues_a_prefill_is_found(talk: Make, echo: str, stream: bool) -> None:
    """Clients send the beginning and what was sampled after it as one message, or as they were."""
    made = talk()
    made.messages.append({"role": "assistant", "content": "So: "})
    first = made.ask(reply=Reply(SPLIT, message=_SAID), stream=stream, **_PREFILL)
    assert first.source.startswith("rendered") and first.sent is None
    if echo != "parts":
        joined = "So: there, "
        made.messages[-2:] = [{**_SAID, "content": joined.strip() if echo == "stripped" else joined}]
    new = user("more")
    for reason in (": text_stripped" if echo == "stripped" else "", ""):
        expected = [*made.ids, *appended_after(made.model, made.ids, [new])]
        answered = made.ask(new, stream=stream)
        assert (answered.source, answered.sent) == (f"extended{reason}", expected)


@pytest.mark.parametrize(
    "begun, fields",
    [
        ({"role": "assistant", "content": "So: "}, {"add_generation_prompt": False}),
        ({"role": "assistant", "content": "So: "}, {**_PREFILL, "truncate_prompt_tokens": 500}),
        ({"role": "assistant", "content": [{"type": "text", "text": "So: "}]}, _PREFILL),
    ],
)
def test_turn_after_a_message_that_is_not_continued_alone_is_not_found(
    talk: Make, begun: Message, fields: dict[str, Any]
) -> None:
    made = talk()
    made.messages.append(begun)
    made.ask(reply=Reply(SPLIT, message=_SAID), **fields)
    made.messages[-2:] = [{**_SAID, "content": "So: there, "}]
    assert made.ask(user("more")).source == "rendered: no_match"
