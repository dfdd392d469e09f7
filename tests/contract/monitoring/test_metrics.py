"""What the metrics of a running proxy tell, over HTTP.

Clients that leave are counted in `tests/contract/web/test_disconnects.py`.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import Canned, FakeVllm, Reply
from tests.support.scraping import Scrape, grown
from tests.support.talk import CHAT, Talk, user
from tests.support.tiny_model import END, TinyModel
from tests.support.utils import run_app, run_proxy, send_and_keep, wait_until
from tokenproxy.settings import Settings

_TOKENS = "/v1/chat/completions/tokens"
_HI = {"messages": [{"role": "user", "content": "Hi"}]}
_IDS = {"prompt_ids": [1, 74]}
_GAUGES = ("requests_in_flight", "requests_queued", "replica_requests_in_flight", "store_calls_in_flight")
_WAIT_S = 0.05


def _at_rest(client: httpx.Client) -> bool:
    scrape = Scrape(client)
    return all(scrape.value(name) == 0 for name in _GAUGES)


@pytest.mark.parametrize(
    ("reply", "stream", "status"),
    [
        (Reply(error=Canned(b'{"error": {"message": "no"}}', 400)), False, 400),
        (Reply(break_at=0, how="inside"), False, 502),
        (Reply(break_at=1, how="reset"), True, 200),
    ],
)
def test_gauges_return_to_zero_after_faults(
    fake: FakeVllm, client: httpx.Client, reply: Reply, stream: bool, status: int
) -> None:
    wait_until(lambda: _at_rest(client))
    before = Scrape(client)
    fake.replies.append(reply)
    answer = client.post(_TOKENS, json={**_IDS, "stream": stream})
    assert answer.status_code == status and '"error"' in answer.text
    wait_until(lambda: _at_rest(client))
    after = Scrape(client)
    assert grown(before, after, "requests_total", route=_TOKENS, status=str(status)) == 1
    assert grown(before, after, "client_disconnects_total") == 0


def test_requests_by_route_and_status(mortal: FakeVllm) -> None:
    mortal.canned["/v1/embeddings"] = Canned(b"[1]")
    requests: list[tuple[str, str, str, str]] = [
        ("POST", CHAT, CHAT, "200"),
        ("POST", "/sessions/s/v1/chat/completions", CHAT, "200"),
        ("POST", "/v1/embeddings", "other", "200"),
        ("GET", "/v1/nothing", "other", "404"),
        ("GET", "/v1/sessions/unknown", "/v1/sessions/{session}", "404"),
        ("GET", "/health", "/health", "200"),
        ("GET", "/v1/sessions", "none", "401"),
    ]
    routes = {route for _, _, route, _ in requests}
    with run_proxy([mortal], admin_key=["k"], store="memory:") as client:
        wait_until(lambda: Scrape(client).value("requests_total", status="401"))  # that of `run_proxy`
        before = Scrape(client)

        def counted() -> float:
            after = Scrape(client)
            return sum(grown(before, after, "requests_total", route=route) for route in routes)

        for method, path, _, status in requests:
            body = _HI if method == "POST" else None
            headers = {} if status == "401" else {"x-api-key": "k"}
            assert str(client.request(method, path, json=body, headers=headers).status_code) == status
        wait_until(lambda: counted() >= len(requests))  # each after its response was sent
        after = Scrape(client)
    for _, _, route, status in requests:
        times = [each[2:] for each in requests].count((route, status))
        assert grown(before, after, "requests_total", route=route, status=status) == times
    assert grown(before, after, "request_seconds_count") == len(requests) - 1  # health checks are not timed
    assert grown(before, after, "store_seconds_count", operation="add") == 2
    assert grown(before, after, "store_seconds_sum", operation="add") > 0


def _not_added(before: Scrape, client: httpx.Client, route: str) -> float:
    """Seconds of the requests since then that somebody else than the proxy took."""
    wait_until(lambda: grown(before, Scrape(client), "request_seconds_count", route=route))
    after = Scrape(client)
    assert grown(before, after, "added_seconds_count", route=route) == 1
    added = grown(before, after, "added_seconds_sum", route=route)
    return grown(before, after, "request_seconds_sum", route=route) - added


def test_a_request_is_in_flight_until_it_ends_and_the_time_of_the_engine_is_not_added(
    fake: FakeVllm, client: httpx.Client
) -> None:
    wait_until(lambda: _at_rest(client))
    before = Scrape(client)
    fake.replies.append(Reply(hold_at=1))
    with send_and_keep(client.base_url, CHAT, json.dumps({**_HI, "stream": True}).encode()) as connection:
        assert connection.recv(1)
        scrape = Scrape(client)
        assert scrape.value("requests_in_flight") == 1
        assert scrape.value("replica_requests_in_flight", replica=fake.url) == 1
        time.sleep(_WAIT_S)
        fake.release()
        assert _not_added(before, client, CHAT) >= _WAIT_S
        wait_until(lambda: _at_rest(client))
    first_byte = grown(before, Scrape(client), "time_to_first_byte_seconds_sum", route=CHAT)
    total = grown(before, Scrape(client), "request_seconds_sum", route=CHAT)
    assert total - first_byte >= _WAIT_S
    assert grown(before, Scrape(client), "client_disconnects_total") == 0


def test_a_request_that_waits_for_a_replica_is_queued(mortal: FakeVllm) -> None:
    mortal.slow_s["/version"] = 60.0  # discovery does not end
    key: Any = "k"  # so that the proxy does not check first whether the engine requires one
    with run_app(Settings(upstreams=[mortal.url], upstream_api_key=key, store="memory:")) as client:
        before = Scrape(client)
        with send_and_keep(client.base_url, CHAT, json.dumps(_HI).encode()):
            wait_until(lambda: Scrape(client).value("requests_queued") == 1)
        wait_until(lambda: _at_rest(client))
        assert Scrape(client).value("queue_seconds_count") == 1
        assert _not_added(before, client, CHAT) >= Scrape(client).value("queue_seconds_sum") > 0


def test_ids_by_how_they_came_to_be(
    talk: Callable[..., Talk], client: httpx.Client, tiny_model: TinyModel
) -> None:
    conversation = talk()
    before = Scrape(client)
    first = conversation.ask(reply=Reply((74, 71, END)))
    middle = Scrape(client)
    prompt = len(tiny_model.render(conversation.messages[:1], add_generation_prompt=True))
    assert grown(before, middle, "prompt_ids_total", kind="rendered") == prompt
    assert grown(before, middle, "sampled_ids_total") == 3
    assert first.prompt["source"] == "rendered"
    second = conversation.follow(user("And?"))
    after = Scrape(client)
    assert grown(middle, after, "prompt_ids_total", kind="reused") == prompt + 3
    assert grown(middle, after, "prompt_ids_total", kind="appended") == int(second.prompt["appended"])
    assert grown(middle, after, "prompt_ids_total", kind="rendered") == 0
    client.post(_TOKENS, json={"prompt_ids": [1, 74, 71]})
    assert grown(after, Scrape(client), "prompt_ids_total", kind="given") == 3
