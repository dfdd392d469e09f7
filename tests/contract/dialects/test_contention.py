"""Many equal texts, cancelled requests, deletes in the middle of a turn: nothing is guessed or lost."""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from uuid import uuid4

import httpx
import pytest

from proxy.history import continuation
from tests.support.fake_vllm import Reply
from tests.support.talk import CHAT, Talk, appended_after, sent_ids, user
from tests.support.tiny_model import END
from tests.support.utils import Pair, send_and_keep

_SPLIT = (74, 71, 78, 78, 81, END)
"""Sampled ids that differ from those of the text they decode to."""
_SAME = {"role": "assistant", "content": "same"}


def _post(
    pair: Pair,
    messages: Sequence[dict[str, Any]],
    reply: Reply | None = None,
    *,
    path: str = CHAT,
    headers: dict[str, str] | None = None,
    **fields: Any,
) -> httpx.Response:
    if reply:
        pair.fake.replies.append(reply)
    response = pair.client.post(path, json={"messages": messages, **fields}, headers=headers)
    pair.fake.replies.clear()
    assert response.status_code == 200, response.text
    return response


def _same(*ids: int) -> Reply:
    return Reply((*ids, END), message={"content": "same"})


@pytest.mark.parametrize("others", [1, 15, 20, 40])
def test_choices_with_equal_text_are_ambiguous_among_any_number_of_others(
    talk: Callable[[], Talk], others: int
) -> None:
    made = talk()
    choices = Reply((80, 81, END), message={"content": "same"}, others=(_same(90, 91, 92),))
    first = _post(made.pair, made.messages, choices, n=2)
    for number in range(others):
        _post(made.pair, made.messages, _same(100 + number))
    headers = {"x-session-id": first.headers["x-session-id"]}
    followed = _post(made.pair, [*made.messages, _SAME, user("more")], headers=headers)
    assert followed.headers["x-prompt-reason"] == "ambiguous"


@pytest.mark.parametrize("silent", [1, 15, 40])
def test_turns_without_ids_do_not_hide_other_candidates(talk: Callable[[], Talk], silent: int) -> None:
    made = talk()
    _post(made.pair, made.messages, _same(80, 81))
    _post(made.pair, made.messages, _same(84, 85))
    for _ in range(silent):
        _post(made.pair, made.messages, replace(_same(90, 91), silent=("ids",)))
    followed = _post(made.pair, [*made.messages, _SAME, user("more")])
    assert followed.headers["x-prompt-reason"] == "ambiguous"


def test_cancelled_request_releases_its_candidate(
    talk: Callable[[], Talk], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = talk()
    sessions = {_post(made.pair, made.messages, Reply(_SPLIT)).headers["x-session-id"] for _ in range(2)}
    reply = {"role": "assistant", "content": made.model.decode(list(_SPLIT))}
    messages = [*made.messages, reply, user("go")]
    exact = continuation.continue_turn

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.4)
        return exact(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr("proxy.history.planner.continue_turn", slow)
        for _ in range(2):
            with send_and_keep(made.pair.client.base_url, CHAT, json.dumps({"messages": messages}).encode()):
                time.sleep(0.2)
            time.sleep(0.6)
    assert _post(made.pair, messages).headers["x-session-id"] in sessions


def test_a_session_may_be_named_while_its_first_turn_streams(talk: Callable[[], Talk]) -> None:
    made = talk()
    client, fake = made.pair.client, made.pair.fake
    fake.replies.append(Reply(_SPLIT, hold_at=2))
    with client.stream("POST", CHAT, json={"messages": made.messages, "stream": True}) as response:
        headers = {"x-session-id": response.headers["x-session-id"]}
        assert client.post(CHAT, json={"messages": [user("Other")]}, headers=headers).status_code == 200
        fake.release()
        response.read()
    fake.replies.clear()
    reply = {"role": "assistant", "content": made.model.decode(list(_SPLIT))}
    followed = _post(made.pair, [*made.messages, reply, user("more")], headers=headers)
    assert followed.headers["x-prompt-source"] == "extended"


def test_turn_whose_ids_differ_from_its_messages_is_not_found_by_them(
    talk: Callable[[], Talk],
) -> None:
    made = talk()
    _post(made.pair, made.messages, Reply(_SPLIT))
    ids = [*made.model.render(made.messages), *_SPLIT]
    other = [*ids, *appended_after(made.model, ids, [user("AAA")])]
    history = [*made.messages, {"role": "assistant", "content": made.model.decode(list(_SPLIT))}, user("BBB")]
    reply = Reply((80, END), message={"content": "zzz"})
    _post(made.pair, history, reply, path=f"{CHAT}/tokens", prompt_ids=other)
    _post(made.pair, [*history, {"role": "assistant", "content": "zzz"}, user("more")])
    sent = sent_ids(made.pair.fake)
    assert sent is None or sent[: len(other)] != other


def test_a_session_deleted_while_a_turn_runs_has_readable_samples(talk: Callable[[], Talk]) -> None:
    made = talk()
    session = f"deleted-{uuid4().hex}"
    made.headers = {"x-session-id": session}
    made.ask(reply=Reply(_SPLIT))
    messages = [*made.messages, user("go")]
    made.pair.fake.replies.append(Reply(_SPLIT, hold_at=0))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(_post, made.pair, messages, headers=made.headers)
        time.sleep(0.3)
        assert made.pair.client.delete(f"/v1/sessions/{session}").status_code == 200
        made.pair.fake.release()
        response = running.result()
    made.messages = [*messages, response.json()["choices"][0]["message"]]
    made.ask(user("again"))
    samples = made.pair.client.get(f"/v1/sessions/{session}/samples")
    assert samples.status_code == 200, samples.text
