"""`/v1/samples`: order, revisions, consumers, filters, tenants, and requests that wait.

`tests/unit/samples/test_feed.py` has the filters themselves.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.contract.web.feed_client import FEED, Feed
from tests.support.fake_vllm import FakeVllm
from tests.support.scraping import Scrape
from tests.support.talk import CHAT, user
from tests.support.utils import run_proxy, run_server, send_and_keep, wait_until
from tokenproxy.app.app import create_app
from tokenproxy.record.feed import MOST_CONSUMERS
from tokenproxy.settings import Settings
from tokenproxy.turn.services import RunningRequests


def test_rollouts_in_the_order_of_finishing(served: Feed) -> None:
    began = time.time()
    for name in ("a", "b", "c"):
        served.turn(name)
    served.finish("late", None, task=[1])
    served.reward("c", 2)
    served.turn("open")
    served.client.post("/finish_session?session_id=a")
    page = served.read()
    found = [(each["rollout"], each["cause"], each["revision"]) for each in page["data"]]
    assert found == [("late", "end", 1), ("c", "reward", 1), ("a", "end", 1)]
    first, last = page["data"][0], page["data"][-1]
    assert first["metadata"] == {"task": [1]}
    assert began <= first["finished"] <= last["finished"]
    [sample] = page["data"][1]["samples"]
    assert sample["reward"] == 2.0
    assert sample == served.client.get("/v1/sessions/c/samples").json()["samples"][0] | {"revision": 1}
    assert served.names(after=first["cursor"]) == ["c", "a"]
    assert served.names(after=page["cursor"]) == []


def test_a_change_after_finishing_is_delivered_again(served: Feed) -> None:
    turn = served.turn("a")
    served.reward("a", 0.5)
    cursor = served.read()["cursor"]
    served.reward("a", 0.5)
    assert served.read(after=cursor)["data"] == []
    served.client.post("/v1/sessions/a/reward", json={"reward": 2.0, "turn": turn})
    [again] = served.read(after=cursor)["data"]
    assert (again["rollout"], again["revision"], again["samples"][0]["reward"]) == ("a", 2, 2.0)
    served.turn("a")
    assert served.client.post("/v1/sessions/a/end").json()["finished"] is True
    [again] = served.read(after=cursor)["data"]
    assert (again["revision"], len(again["samples"])) == (3, 2)


def test_idle_rollouts_are_finished(engine: FakeVllm) -> None:
    with run_proxy([engine], store="memory:", finish_after_s=0.4) as client:
        answer = client.post(CHAT, json={"messages": [user("Hi")]})
        [rollout] = Feed(client).read(wait=20)["data"]
        assert (rollout["rollout"], rollout["cause"]) == (answer.headers["x-session-id"], "idle")


def test_a_consumer_continues_after_what_it_acknowledged(served: Feed) -> None:
    for number in range(4):
        served.finish(f"r{number}")
    page = served.read(consumer="c", limit=2)
    assert served.names(consumer="c", limit=2) == ["r0", "r1"]  # reading acknowledges nothing
    served.acknowledge("c", page["cursor"])
    assert served.acknowledge("c", "1") == page["cursor"]
    assert served.names(consumer="c") == ["r2", "r3"]
    assert served.names(consumer="c", after="0", limit=1) == ["r0"]
    # a cursor beyond the end is the end: its reader's store was lost
    assert served.acknowledge("other", "9" * 18) == served.read()["cursor"]
    served.finish("later")
    assert served.names(consumer="other") == ["later"]


def test_consumers_are_limited(served: Feed) -> None:
    for number in range(MOST_CONSUMERS):
        served.acknowledge(f"c{number}", "0")
    for refused in (
        served.client.get(FEED, params={"consumer": "new"}),
        served.client.post(f"{FEED}/ack", json={"consumer": "new", "cursor": "0"}),
    ):
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_many_consumers")
    served.acknowledge("c0", "0")
    assert served.read(consumer="c1")["data"] == []


def test_bad_requests(client: httpx.Client) -> None:
    wrong = "limit=0 limit=1.5 limit=1&limit=2 wait=301 wait=nan after=now after=1111111111111111111"
    wrong += " metadata=env weights=7 weight_version= layout=other shared=twice consumer=a%20b"
    answers = [(query.partition("=")[0], client.get(f"{FEED}?{query}")) for query in wrong.split()]
    acknowledgement = {"consumer": "c", "cursor": 1}
    answers.append(("cursor", client.post(f"{FEED}/ack", json=acknowledgement)))
    for param, answer in answers:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.url


def test_a_tenant_reads_only_its_own_rollouts(engine: FakeVllm) -> None:
    with run_proxy([engine], store="memory:", api_key=["one", "two"], admin_key=["three"]) as client:
        one, two, three = (Feed(client, key) for key in ("one", "two", "three"))
        one.finish("same")
        two.finish("same")
        one.finish("more")
        two.acknowledge("c", two.read()["cursor"])
        assert one.names(consumer="c") == ["same", "more"]
        for feed, waiting in ((one, [2]), (two, [0]), (three, [])):
            assert [each["waiting"] for each in feed.consumers()] == waiting
        assert client.delete(f"{FEED}/consumers/c", headers=three.headers).status_code == 404
        # when others finished something is no business of a tenant
        assert two.acknowledge("d", "9" * 18) == two.read(after="9" * 18)["cursor"] == two.read()["cursor"]
        assert three.acknowledge("d", "9" * 18) == three.read(after="9" * 18)["cursor"] == "0"


def test_a_wait_ends_and_is_no_time_that_the_proxy_adds(served: Feed) -> None:
    assert served.read(wait=0.5)["data"] == []
    wait_until(lambda: Scrape(served.client).value("request_seconds_count", route=FEED))
    scrape = Scrape(served.client)
    total, added = (scrape.value(f"{name}_seconds_sum", route=FEED) for name in ("request", "added"))
    assert total > added  # how much is left for the wait depends on how long the feed was read


def test_a_client_that_leaves_ends_its_wait(served: Feed) -> None:
    def in_flight() -> float:
        return Scrape(served.client).value("requests_in_flight")

    with send_and_keep(served.client.base_url, f"{FEED}?wait=60", b"", method="GET"):
        wait_until(lambda: in_flight() == 1)
    wait_until(lambda: in_flight() == 0)
    assert Scrape(served.client).value("client_disconnects_total", route=FEED) == 1


def test_a_proxy_that_stops_does_not_wait(engine: FakeVllm) -> None:
    running = RunningRequests()
    app = create_app(Settings(upstreams=[engine.url], store="memory:"), running)
    with (
        run_server(app) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=30) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        waiting = thread.submit(client.get, FEED, params={"wait": 60})
        wait_until(lambda: Scrape(client).value("requests_in_flight") == 1)
        running.stopping = True
        answer = waiting.result(20)
        assert (answer.status_code, answer.json()["data"]) == (200, [])
