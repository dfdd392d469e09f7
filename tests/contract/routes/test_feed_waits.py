"""`/v1/samples?wait=`: requests that wait for rollouts, and many that do at once."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx

from proxy.app import create_app
from proxy.settings import Settings
from proxy.turn.running import RunningRequests
from tests.support.fake_vllm import FakeVllm
from tests.support.feed_client import FEED, Feed
from tests.support.scraping import Scrape
from tests.support.utils import run_server, send_and_keep, wait_until


def _later(work: Any) -> "Future[Any]":
    executor = ThreadPoolExecutor(1)
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future


def test_a_request_waits_for_the_first_rollout(served: Feed) -> None:
    served.turn("a")
    waiting = _later(lambda: (served.read(wait=20), time.monotonic()))
    time.sleep(0.5)
    assert not waiting.done()
    served.reward("a", 1.0)
    finished = time.monotonic()
    page, got = waiting.result(20)
    assert [each["rollout"] for each in page["data"]] == ["a"]
    assert got - finished < 0.15  # a poll alone would take up to 0.2


def test_a_wait_ends(served: Feed) -> None:
    began = time.monotonic()
    assert served.read(wait=0.3)["data"] == []
    assert 0.25 < time.monotonic() - began < 3


def test_a_wait_is_no_time_that_the_proxy_adds(served: Feed) -> None:
    served.read(wait=0.4)
    assert Scrape(served.client).value("added_seconds_sum", route=FEED) < 0.2


def test_a_client_that_leaves_ends_its_wait(served: Feed) -> None:
    url = served.client.base_url

    def in_flight() -> float:
        return Scrape(served.client).value("requests_in_flight")

    with send_and_keep(url, f"{FEED}?wait=60", b"", method="GET"):
        wait_until(lambda: in_flight() == 1)
        time.sleep(0.2)  # the proxy watches for the disconnect
    wait_until(lambda: in_flight() == 0, 5)
    assert Scrape(served.client).value("client_disconnects_total", route=FEED) == 1


def test_many_requests_wait_at_once(served: Feed) -> None:
    served.turn("a")
    with ThreadPoolExecutor(20) as threads:
        waiting = [threads.submit(served.names, wait=20, consumer=f"c{number}") for number in range(20)]
        wait_until(lambda: Scrape(served.client).value("requests_in_flight") == 20)
        served.reward("a", 1.0)
        assert [each.result(20) for each in waiting] == [["a"]] * 20


def test_a_proxy_that_stops_does_not_wait(engine: FakeVllm) -> None:
    running = RunningRequests()
    app = create_app(Settings(upstreams=[engine.url], store="memory:"), running)
    with run_server(app) as url, httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        waiting = _later(lambda: client.get(FEED, params={"wait": 60}))
        time.sleep(0.3)
        running.stopping = True
        answer = waiting.result(5)
        assert (answer.status_code, answer.json()["data"]) == (200, [])


def test_readers_and_writers_at_once(served: Feed) -> None:
    """Each reader gets every rollout, in one order."""
    names = [f"r{number}" for number in range(60)]
    for name in names:
        served.turn(name)
    read: dict[str, list[str]] = {"a": [], "b": []}

    def consume(consumer: str) -> None:
        while len(read[consumer]) < len(names):
            page = served.read(consumer=consumer, wait=20, limit=7)
            read[consumer] += [each["rollout"] for each in page["data"]]
            served.acknowledge(consumer, page["cursor"])

    readers = [threading.Thread(target=consume, args=(consumer,), daemon=True) for consumer in read]
    for reader in readers:
        reader.start()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda name: served.reward(name, 1.0), names))
    for reader in readers:
        reader.join(30)
        assert not reader.is_alive()
    assert read["a"] == read["b"]
    assert sorted(read["a"]) == sorted(names)
