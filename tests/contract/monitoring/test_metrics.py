"""What the metrics of a running proxy tell, over HTTP."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from proxy.settings import Settings
from proxy.stores.memory import MemoryStore
from tests.support.fake_vllm import Canned, FakeVllm, Reply
from tests.support.scraping import Scrape, grown
from tests.support.talk import CHAT, Talk, user
from tests.support.tiny_model import END, TinyModel
from tests.support.utils import EVERY_SPELLING, run_app, run_proxy, send_and_keep, wait_until

_TOKENS = "/v1/chat/completions/tokens"
_HI = {"messages": [{"role": "user", "content": "Hi"}]}
_GAUGES = ("requests_in_flight", "requests_queued", "replica_requests_in_flight", "store_calls_in_flight")


@pytest.fixture
def own(tiny_model: TinyModel) -> Iterator[tuple[FakeVllm, httpx.Client]]:
    """An engine and a client of a proxy that no other test uses."""
    with FakeVllm(tiny_model) as fake, run_proxy([fake], store="memory:") as client:
        yield fake, client


def _at_rest(client: httpx.Client) -> bool:
    scrape = Scrape(client)
    return all(scrape.value(name) == 0 for name in _GAUGES)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_in_flight_until_it_ends(fake: FakeVllm, client: httpx.Client, stream: bool) -> None:
    wait_until(lambda: _at_rest(client))
    fake.replies.append(Reply(hold_at=0))
    with send_and_keep(client.base_url, CHAT, json.dumps({**_HI, "stream": stream}).encode()) as connection:
        wait_until(lambda: fake.running)
        scrape = Scrape(client)
        assert scrape.value("requests_in_flight") == 1
        assert scrape.value("replica_requests_in_flight", replica=fake.url) == 1
        fake.release()
        assert connection.recv(1)
        wait_until(lambda: _at_rest(client))


_FAULTS: dict[str, tuple[Reply, int]] = {
    "an error": (Reply(error=Canned(b'{"error": {"message": "no"}}', 400)), 400),
    "breaks before the head": (Reply(break_at=0, how="head"), 502),
}


@EVERY_SPELLING
@pytest.mark.parametrize("reply, status", _FAULTS.values(), ids=_FAULTS)
def test_gauges_return_to_zero_after_faults(
    fake: FakeVllm, client: httpx.Client, reply: Reply, status: int
) -> None:
    before = Scrape(client)
    fake.replies.append(reply)
    assert client.post(_TOKENS, json={"prompt_ids": [1, 74]}).status_code == status
    wait_until(lambda: _at_rest(client))
    after = Scrape(client)
    assert grown(before, after, "requests_total", route=_TOKENS, status=str(status)) == 1
    assert grown(before, after, "client_disconnects_total") == 0


def test_gauges_return_to_zero_after_a_body_that_is_cut_off(fake: FakeVllm, client: httpx.Client) -> None:
    before = Scrape(client)
    for path, status in ((CHAT, "502"), (_TOKENS, "502")):  # whole bodies are read before they are sent
        fake.replies.append(Reply(break_at=0, how="inside"))
        with suppress(httpx.RemoteProtocolError):
            client.post(path, json=_HI if path == CHAT else {"prompt_ids": [1, 74]})
        wait_until(lambda: _at_rest(client))
        assert grown(before, Scrape(client), "requests_total", route=path, status=status) == 1
    assert grown(before, Scrape(client), "client_disconnects_total") == 0


@EVERY_SPELLING
def test_gauges_return_to_zero_after_a_broken_stream(fake: FakeVllm, client: httpx.Client) -> None:
    before = Scrape(client)
    fake.replies.append(Reply(break_at=1, how="reset"))
    answer = client.post(_TOKENS, json={"prompt_ids": [1, 74], "stream": True})
    assert '"error"' in answer.text
    wait_until(lambda: _at_rest(client))
    after = Scrape(client)
    assert grown(before, after, "requests_total", route=_TOKENS, status="200") == 1
    assert grown(before, after, "client_disconnects_total") == 0


@EVERY_SPELLING
@pytest.mark.parametrize("hold_at, stream, status", [(0, False, "499"), (0, True, "499"), (1, True, "200")])
def test_a_client_that_leaves_is_counted(
    fake: FakeVllm, client: httpx.Client, hold_at: int, stream: bool, status: str
) -> None:
    before = Scrape(client)
    fake.replies.append(Reply(hold_at=hold_at))
    body = json.dumps({"prompt_ids": [1, 74], "stream": stream}).encode()
    with send_and_keep(client.base_url, _TOKENS, body) as connection:
        wait_until(lambda: fake.running)
        if hold_at:
            assert connection.recv(1)  # the head, which comes with the first event
    wait_until(lambda: grown(before, Scrape(client), "client_disconnects_total", route=_TOKENS))
    wait_until(lambda: _at_rest(client))
    assert grown(before, Scrape(client), "requests_total", route=_TOKENS, status=status) == 1


def test_a_client_that_leaves_while_it_sends_is_counted(client: httpx.Client) -> None:
    before = Scrape(client)
    with send_and_keep(client.base_url, _TOKENS, b"{", announced=10):
        wait_until(lambda: Scrape(client).value("requests_in_flight") == 1)
    wait_until(lambda: grown(before, Scrape(client), "client_disconnects_total", route=_TOKENS))
    wait_until(lambda: _at_rest(client))


def test_completed_request_is_not_a_disconnect(client: httpx.Client) -> None:
    before = Scrape(client)
    for stream in (False, True):
        for _ in range(5):
            assert client.post(_TOKENS, json={"prompt_ids": [1, 74], "stream": stream}).is_success
    wait_until(lambda: _at_rest(client))
    assert grown(before, Scrape(client), "client_disconnects_total") == 0


def test_requests_by_route_and_status(own: tuple[FakeVllm, httpx.Client]) -> None:
    fake, client = own
    fake.canned["/v1/embeddings"] = Canned(b"[1]")
    before = Scrape(client)
    requests: list[tuple[str, str, str, str]] = [
        ("POST", CHAT, CHAT, "200"),
        ("POST", "/chat/completions/", CHAT, "200"),
        ("POST", "/sessions/s/v1/chat/completions", CHAT, "200"),
        ("POST", "/v1/embeddings", "other", "200"),
        ("GET", "/v1/nothing", "other", "404"),
        ("GET", "/v1/sessions/unknown", "/v1/sessions/{session}", "404"),
        ("GET", "/health", "/health", "200"),
    ]
    for method, path, _, status in requests:
        assert str(client.request(method, path, json=_HI if method == "POST" else None).status_code) == status
    after = Scrape(client)
    counted = {(route, status) for _, _, route, status in requests}
    for route, status in counted:
        times = [each[2:] for each in requests].count((route, status))
        assert grown(before, after, "requests_total", route=route, status=status) == times
    assert grown(before, after, "request_seconds_count") == len(requests) - 1  # health checks are not timed


def test_requests_refused_for_their_key_are_counted(tiny_model: TinyModel) -> None:
    with FakeVllm(tiny_model) as fake, run_proxy([fake], api_key=["k"], store="memory:") as client:
        assert client.post(CHAT, json=_HI).status_code == 401
        assert Scrape(client).value("requests_total", route="none", status="401") >= 1


def test_the_time_of_the_engine_is_not_added_time(own: tuple[FakeVllm, httpx.Client]) -> None:
    fake, client = own
    client.post(CHAT, json=_HI)
    before = Scrape(client)
    fake.slow_s[CHAT] = 1.0
    client.post(CHAT, json=_HI)
    after = Scrape(client)
    assert grown(before, after, "request_seconds_sum", route=CHAT) >= 1.0
    assert grown(before, after, "time_to_first_byte_seconds_sum", route=CHAT) >= 1.0
    assert 0 < grown(before, after, "added_seconds_sum", route=CHAT) < 0.9
    assert grown(before, after, "added_seconds_count", route=CHAT) == 1


def test_the_time_of_a_streaming_engine_is_not_added_time(fake: FakeVllm, client: httpx.Client) -> None:
    before = Scrape(client)
    fake.replies.append(Reply(hold_at=1))
    with client.stream("POST", CHAT, json={**_HI, "stream": True}) as response:
        chunks = response.iter_raw()
        next(chunks)
        time.sleep(1.0)
        fake.release()
        for _ in chunks:
            pass
    wait_until(lambda: grown(before, Scrape(client), "request_seconds_count", route=CHAT))
    after = Scrape(client)
    assert grown(before, after, "request_seconds_sum", route=CHAT) >= 1.0
    assert grown(before, after, "time_to_first_byte_seconds_sum", route=CHAT) < 0.9
    assert 0 < grown(before, after, "added_seconds_sum", route=CHAT) < 0.9


def test_a_slow_upload_is_not_added_time(client: httpx.Client) -> None:
    def body() -> Iterator[bytes]:
        yield b'{"prompt_ids": [1'
        time.sleep(1.0)
        yield b", 74]}"

    before = Scrape(client)
    assert client.post(_TOKENS, content=body()).status_code == 200
    after = Scrape(client)
    assert grown(before, after, "request_seconds_sum", route=_TOKENS) >= 1.0
    assert grown(before, after, "added_seconds_sum", route=_TOKENS) < 0.9


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


def test_two_choices_render_one_prompt(client: httpx.Client, tiny_model: TinyModel) -> None:
    messages = [user("Two choices, please")]
    before = Scrape(client)
    client.post(CHAT, json={"messages": messages, "n": 2})
    after = Scrape(client)
    prompt = len(tiny_model.render(messages, add_generation_prompt=True))
    assert grown(before, after, "prompt_ids_total", kind="rendered") == prompt
    assert grown(before, after, "turns_total") == 2


def test_the_state_of_replicas(tiny_model: TinyModel) -> None:
    with (
        FakeVllm(tiny_model) as fake,
        FakeVllm(tiny_model) as other,
        run_proxy([fake, other], store="memory:") as client,
    ):
        assert (_states(client, fake.url), _states(client, other.url)) == (["ready"], ["ready"])
        fake.healthy = False
        wait_until(lambda: _states(client, fake.url) == ["down"])
        assert _states(client, other.url) == ["ready"]
        assert Scrape(client).value("replica_ejections_total", replica=fake.url) == 1
        fake.healthy = True
        wait_until(lambda: _states(client, fake.url) == ["ready"])


def _states(client: httpx.Client, replica: str) -> list[str]:
    scrape = Scrape(client)
    labels = [labels for labels in scrape.labels("replica_state") if labels["replica"] == replica]
    return [each["state"] for each in labels if scrape.value("replica_state", **dict(each)) == 1]


def test_a_request_that_waits_for_a_replica_is_queued(tiny_model: TinyModel) -> None:
    with FakeVllm(tiny_model) as fake:
        fake.slow_s["/version"] = 60.0  # discovery does not end
        key: Any = "k"  # so that the proxy does not check first whether the engine requires one
        with run_app(Settings(upstreams=[fake.url], upstream_api_key=key, store="memory:")) as client:
            with send_and_keep(client.base_url, CHAT, json.dumps(_HI).encode()):
                wait_until(lambda: Scrape(client).value("requests_queued") == 1)
            wait_until(lambda: _at_rest(client))
            scrape = Scrape(client)
            assert scrape.value("queue_seconds_count") == 1
            assert scrape.value("added_seconds_sum", route=CHAT) < scrape.value("queue_seconds_sum")


def test_the_store_is_timed(own: tuple[FakeVllm, httpx.Client]) -> None:
    _, client = own
    before = Scrape(client)
    client.post(CHAT, json=_HI)
    after = Scrape(client)
    assert grown(before, after, "store_seconds_count", operation="add") == 1
    assert grown(before, after, "store_seconds_sum", operation="add") > 0


def test_a_slow_store_is_seen(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = MemoryStore.add

    async def slow(store: MemoryStore, *arguments: Any) -> Any:
        await asyncio.sleep(1.0)
        return await inner(store, *arguments)

    monkeypatch.setattr(MemoryStore, "add", slow)
    with FakeVllm(tiny_model) as fake, run_proxy([fake], store="memory:") as client:
        with send_and_keep(client.base_url, CHAT, json.dumps(_HI).encode()) as connection:
            wait_until(lambda: Scrape(client).value("store_calls_in_flight") == 1)
            assert connection.recv(1)
        scrape = Scrape(client)
        assert scrape.value("store_seconds_sum", operation="add") >= 0.99
        assert scrape.value("added_seconds_sum", route=CHAT) >= 0.99  # it is time that the proxy adds
