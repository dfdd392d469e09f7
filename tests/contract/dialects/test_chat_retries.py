"""A request that is sent again is answered once."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import Canned, Reply, error_body
from tests.support.talk import CHAT, Talk, user
from tests.support.tiny_model import END
from tests.support.utils import EVERY_SPELLING, send_and_keep, wait_until

Make = Callable[..., Talk]


def _turns(made: Talk, answer: httpx.Response) -> list[dict[str, Any]]:
    session = answer.headers["x-session-id"]
    turns: list[dict[str, Any]] = made.pair.client.get(f"/v1/sessions/{session}").json()["turns"]
    return turns


def _requests(made: Talk) -> int:
    """The number of requests for a completion that the engine received."""
    return len([seen for seen in made.pair.fake.seen(CHAT) if seen.json.get("max_tokens") != 1])


def _post(made: Talk, body: dict[str, Any], **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return made.pair.client.post(CHAT, json=body, headers={"x-stainless-retry-count": "0", **named})


def _in_session(made: Talk, body: dict[str, Any], **headers: str) -> httpx.Response:
    return _post(made, body, x_session_id=made.messages[0]["content"].replace(" ", "-"), **headers)


def test_a_retry_in_a_session_is_known_by_its_count(talk: Make) -> None:
    made = talk()
    body = {"messages": made.messages}
    first = _in_session(made, body)
    second = _in_session(made, body, x_stainless_retry_count="1")
    assert (second.content, second.headers["x-request-replayed"]) == (first.content, "true")
    assert _requests(made) == len(_turns(made, first)) == 1


@pytest.mark.parametrize("headers", [{}, {"idempotency_key": "k"}])
def test_a_request_that_failed_runs_anew(talk: Make, headers: dict[str, str]) -> None:
    made = talk()
    headers = {name: f"{value}-{made.messages[0]['content']}" for name, value in headers.items()}
    body = {"messages": made.messages}
    made.pair.fake.replies.append(Reply(error=Canned(error_body("busy", "Error", None, 429), 429)))
    assert _in_session(made, body, **headers).status_code == 429
    answer = _in_session(made, body, **headers, x_stainless_retry_count="1")
    assert (answer.status_code, "x-request-replayed" in answer.headers) == (200, False)
    assert len(_turns(made, answer)) == 1
    again = _in_session(made, body, **headers, x_stainless_retry_count="2")
    assert again.headers["x-turn-id"] == answer.headers["x-turn-id"]


@EVERY_SPELLING
@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_of_a_request_whose_client_left(talk: Make, stream: bool) -> None:
    made = talk()
    made.ask()
    body = {"messages": [*made.messages, user("more")], "stream": stream}
    made.pair.fake.replies.append(Reply((91, 92, END), hold_at=1 if stream else 0))
    wait_until(lambda: not made.pair.fake.running)  # the first turn is over at the engine too
    before = made.pair.fake.aborted
    with send_and_keep(made.pair.client.base_url, CHAT, json.dumps(body).encode()):
        wait_until(lambda: made.pair.fake.running)
    wait_until(lambda: made.pair.fake.aborted == before + 1)
    made.pair.fake.replies.append(Reply((93, END)))
    answer = _post(made, body, x_stainless_retry_count="1")
    assert "x-request-replayed" not in answer.headers
    assert answer.headers["x-prompt-source"] == "extended"


@pytest.mark.parametrize("stream", [False, True])
def test_repeated_key_waits_for_the_first_response(talk: Make, stream: bool) -> None:
    made = talk()
    body, key = {"messages": made.messages, "stream": stream}, made.messages[0]["content"]
    made.pair.fake.replies.append(Reply((91, 92, END), hold_at=0))
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(_post, made, body, idempotency_key=key)
        wait_until(lambda: made.pair.fake.running)
        others = [pool.submit(_post, made, body, idempotency_key=key) for _ in range(3)]
        made.pair.client.get("/v1/sessions")  # what was sent before this has arrived
        made.pair.fake.release()
        assert {other.result().content for other in others} == {first.result().content}
    assert _requests(made) == 1
