"""The client against the real application on a real socket, blocking and with asyncio."""

import inspect
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from tests.support.fake_vllm import Canned, FakeVllm, Reply
from tests.support.ports import held_port
from tests.support.scraping import Scrape
from tests.support.talk import user
from tests.support.tiny_model import END
from tests.support.utils import run_proxy, wait_until
from tokenproxy.client import (
    AsyncClient,
    Client,
    ErrorResponse,
    InvalidRequest,
    NoResponse,
    UnknownResource,
    UnreadableResponse,
)

Open = Callable[..., Any]


class _BlockingClient(ExitStack):
    """Runs the methods of an `AsyncClient` in an event loop of another thread, for tests of both."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__()
        self._portal = self.enter_context(start_blocking_portal())
        opened = self._portal.wrap_async_context_manager(AsyncClient(url, **options))
        self._client = self.enter_context(opened)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            return self._iterate(result) if inspect.isasyncgen(result) else self._portal.call(lambda: result)

        return call

    def _iterate(self, values: AsyncIterator[Any]) -> Iterator[Any]:
        while True:
            try:
                yield self._portal.call(anext, values)
            except StopAsyncIteration:
                return


@pytest.fixture(params=[Client, _BlockingClient], ids=["blocking", "asyncio"])
def open_client(request: pytest.FixtureRequest) -> Open:
    """Makes a client of either kind."""
    return lambda url, **options: request.param(str(url), **options)


@pytest.fixture
def client(open_client: Open, engine: FakeVllm) -> Iterator[Any]:
    """A client of a proxy with an empty feed."""
    with run_proxy([engine], store="memory:") as http, open_client(http.base_url) as client:
        yield client


def _finish(client: Any, *names: str, **metadata: Any) -> None:
    for name in names:
        client.create_session(name, metadata=metadata)
        client.token_turn(messages=[user(name)], session=name)
        client.set_reward(name, 1.0)


def test_models_and_sessions(client: Any) -> None:
    base, adapter = client.models()
    assert {base.id: base.parent, adapter.id: adapter.parent} == {"tiny": None, "adapter": "tiny"}
    made = client.create_session("s", defaults={"temperature": 0.5}, metadata={"env": "math"})
    assert (made.id, made.defaults, made.turn_count) == ("s", {"temperature": 0.5}, 0)
    changed = client.create_session("s", metadata={"env": "code"})
    assert (changed.metadata, changed.defaults) == ({"env": "code"}, {"temperature": 0.5})
    assert client.create_session(exists="error").id != client.create_session().id
    with pytest.raises(InvalidRequest) as taken:
        client.create_session("s", exists="error")
    assert (taken.value.status, taken.value.code, taken.value.param) == (409, "session_exists", "id")
    turn = client.token_turn(messages=[user("Hi")], session="s")
    read = client.session("s", ids=True)
    assert (read.turn_count, read.reward, [each["id"] for each in read.turns]) == (1, None, [turn.turn])
    assert read.turns[0]["completion_ids"] == turn.completion_ids
    assert "completion_ids" not in client.session("s").turns[0]
    assert (client.end_session("s"), client.end_session("s")) == (True, False)
    client.delete_session("s")
    with pytest.raises(UnknownResource) as missing:
        client.session("s")
    assert (missing.value.status, missing.value.code) == (404, "session_not_found")
    assert missing.value.message == "unknown session 's': never used, deleted, or evicted"


def test_token_turns(client: Any, engine: FakeVllm) -> None:
    engine.replies.append(Reply((74, 71, END)))
    first = client.token_turn(messages=[user("Hi")], session="s", model="tiny", temperature=0.7)
    assert first.completion_ids == [74, 71, END]
    assert first.logprobs == pytest.approx([-74 / 8, -71 / 8, -END / 8])
    assert (first.session, first.finish_reason, first.message["role"]) == ("s", "stop", "assistant")
    second = client.token_turn(first.ids, [user("More")], session="s", logprobs=False)
    assert second.prompt_ids[: len(first.ids)] == first.ids and second.logprobs is None
    exact = client.token_turn(second.ids)
    assert (exact.prompt_ids, exact.session) == (second.ids, None)
    [sample] = client.samples("s").samples
    assert sample["prompt_ids"] + sample["completion_ids"] == second.ids
    assert client.samples("s", layout="verl", shared="each").samples[0]["num_turns"] == 4
    for options in ({"stream": True}, {"n": 2}):
        with pytest.raises(ValueError, match="one whole response"):
            client.token_turn(first.ids, **options)


def test_rewards_and_samples(client: Any) -> None:
    turn = client.token_turn(messages=[user("Hi")], session="s")
    assert client.set_reward("s", 0.5, turn=turn.turn) == {turn.turn: 0.5}
    assert client.set_reward("s", 1) == {"": 1.0, turn.turn: 0.5}
    assert client.set_rewards("s", {"": 2.0, turn.turn: 0.0}) == {"": 2.0, turn.turn: 0.0}
    assert client.session("s").reward == 2.0
    [rollout] = client.read_feed(classes=["main", "unknown"]).data
    assert (rollout.rollout, rollout.revision, rollout.cause) == ("s", 2, "reward")
    assert client.read_feed(classes=["main"]).data == []
    assert len(client.samples("s", classes=["unknown"]).samples) == 1
    assert client.samples("s", classes=["main", "subagent"]).samples == []
    with pytest.raises(InvalidRequest) as refused:
        client.set_rewards("s", {"": 9.0, "missing": 1.0})
    assert (refused.value.status, refused.value.param) == (400, "turn")


def test_the_feed_page_by_page(client: Any) -> None:
    _finish(client, "a", "b", "c", env="math")
    _finish(client, "d", env="code")
    first = client.read_feed("trainer", limit=2)
    assert ([each.rollout for each in first.data], first.more) == (["a", "b"], True)
    assert first.data[1].cursor == first.cursor
    assert client.acknowledge("trainer", first.cursor) == first.cursor
    rest = client.read_feed("trainer", layout="trl", metadata={"env": "math"})
    assert [(each.rollout, each.metadata) for each in rest.data] == [("c", {"env": "math"})]
    assert "env_mask" in rest.data[0].samples[0]
    assert client.read_feed(after=rest.cursor, wait_s=0.05).data == []
    assert client.read_feed(weight_versions=["7"]).data == []
    [consumer] = client.consumers()
    assert (consumer.consumer, consumer.cursor, consumer.waiting) == ("trainer", first.cursor, 2)
    assert consumer.oldest == rest.data[0].finished
    client.forget_consumer("trainer")
    assert client.consumers() == []
    with pytest.raises(UnknownResource):
        client.forget_consumer("trainer")


def test_the_feed_as_an_iterator(client: Any) -> None:
    """What a consumer that is killed got and did not acknowledge comes again."""
    _finish(client, *"abcde")
    feed = client.feed("trainer", limit=2, wait_s=5)
    assert [next(feed).rollout for _ in range(3)] == ["a", "b", "c"]
    # c is not processed yet, as far as the iterator knows
    assert client.consumers()[0].waiting == 3
    assert [each.rollout for each in itertools.islice(client.feed("trainer", limit=2), 2)] == ["c", "d"]
    assert [next(feed).rollout for _ in range(2)] == ["d", "e"]
    writer = threading.Timer(0.05, _finish, (client, "late"))
    writer.start()
    assert next(feed).rollout == "late"
    writer.join()
    assert client.consumers()[0].waiting == 1


def test_filters_that_leave_out_much_are_acknowledged_too(client: Any) -> None:
    _finish(client, *"abc")
    feed = client.feed("trainer", wait_s=0.05, metadata={"env": "math"})
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(next, feed)
        wait_until(lambda: [each.waiting for each in client.consumers()] == [0])
        _finish(client, "d", env="math")
        assert reading.result(20).rollout == "d"


def test_no_request_waits_for_another(open_client: Open, engine: FakeVllm) -> None:
    at_once = 110  # httpx sends 100 by default
    with (
        run_proxy([engine], store="memory:") as http,
        open_client(http.base_url) as client,
        ThreadPoolExecutor(at_once) as threads,
    ):
        waiting = [threads.submit(client.read_feed, wait_s=20) for _ in range(at_once)]
        wait_until(lambda: Scrape(http).value("requests_in_flight") == at_once)
        _finish(client, "a")
        assert {each.result().data[0].rollout for each in waiting} == {"a"}


def test_a_proxy_that_is_down(open_client: Open) -> None:
    with held_port() as port, open_client(f"http://127.0.0.1:{port}/v1") as client:
        with pytest.raises(NoResponse, match=r"no response of http://127\.0\.0\.1:"):
            client.session("s")
        began = time.monotonic()
        with pytest.raises(NoResponse):
            next(client.feed("trainer", patience_s=0.1))
        assert time.monotonic() - began > 0.1


def test_responses_that_are_not_of_the_proxy(open_client: Open, engine: FakeVllm) -> None:
    with open_client(engine.url) as client:
        with pytest.raises(ErrorResponse):
            client.consumers()
        for canned in (Canned(b"<html>"), Canned(b"{}", headers={"content-encoding": "gzip"})):
            engine.canned["/v1/samples"] = canned
            with pytest.raises(UnreadableResponse, match=str(engine.port)):
                client.read_feed()
        engine.canned["/v1/samples/consumers"] = Canned(b"{}")
        with pytest.raises(UnreadableResponse, match="data"):
            client.consumers()
    engine.reset()


def test_a_call_is_a_coroutine() -> None:
    """`asyncio.create_task` takes no other awaitable."""
    call: Coroutine[Any, Any, Any] = AsyncClient("http://127.0.0.1:1").models()
    call.close()
