"""`/v1/samples`: order, revisions, consumers, filters, tenants."""

import json
import time
from typing import Any

import httpx
import pytest

from proxy.history import feed_tasks
from proxy.routes.feed import MOST_CONSUMERS
from proxy.samples import feed
from proxy.samples.layouts import LAYOUTS
from tests.support.fake_vllm import FakeVllm
from tests.support.feed_client import FEED, Feed
from tests.support.scraping import Scrape
from tests.support.talk import CHAT, user
from tests.support.utils import run_proxy, wait_until


def test_rollouts_in_the_order_of_finishing(served: Feed) -> None:
    empty = served.read()
    assert (empty["data"], empty["cursor"], empty["more"]) == ([], "0", False)
    began = time.time()
    for name in ("a", "b", "c"):
        served.turn(name)
    served.finish("late", None, task=[1])
    served.reward("c", 2)
    served.turn("open")
    served.client.post("/finish_session?session_id=a")
    page = served.read()
    assert [(each["rollout"], each["cause"]) for each in page["data"]] == [
        ("late", "end"),
        ("c", "reward"),
        ("a", "end"),
    ]
    assert [each["revision"] for each in page["data"]] == [1, 1, 1]
    first, last = page["data"][0], page["data"][-1]
    assert first["metadata"] == {"task": [1]}
    assert began <= first["finished"] <= last["finished"] <= time.time()
    assert last["cursor"] == page["cursor"]
    [sample] = page["data"][1]["samples"]
    assert (sample["rollout"], sample["reward"], sample["revision"]) == ("c", 2.0, 1)
    assert sample == served.client.get("/v1/sessions/c/samples").json()["samples"][0] | {"revision": 1}
    assert served.names(after=first["cursor"]) == ["c", "a"]
    assert served.names(after=page["cursor"]) == []


def test_pages(served: Feed) -> None:
    names = [served.finish(f"r{number}") for number in range(5)]
    read: list[str] = []
    cursor, more = "", True
    while more:
        page = served.read(limit=2, after=cursor)
        assert len(page["data"]) == min(2, 5 - len(read))
        read += [each["rollout"] for each in page["data"]]
        cursor, more = page["cursor"], page["more"]
    assert read == names


def test_a_change_after_finishing_is_delivered_again(served: Feed) -> None:
    turn = served.turn("a")
    served.finish("b")
    served.reward("a", 0.5)
    cursor = served.read()["cursor"]
    served.reward("a", 0.5)
    served.end("a")
    assert served.read(after=cursor)["data"] == []
    changes: list[dict[str, Any]] = [{"reward": 1.0}, {"reward": 2.0, "turn": turn}]
    for number, change in enumerate(changes, 2):
        served.client.post("/v1/sessions/a/reward", json=change)
        [again] = served.read(after=cursor)["data"]
        assert (again["rollout"], again["revision"]) == ("a", number)
        assert again["samples"][0]["reward"] == change["reward"]
    served.turn("a")
    assert served.read(after=cursor)["data"][0]["revision"] == 3
    assert served.client.post("/v1/sessions/a/end").json()["finished"] is True
    [again] = served.read(after=cursor)["data"]
    assert (again["revision"], len(again["samples"])) == (4, 2)
    assert served.names() == ["b", "a"]


def test_sessions_without_turns_and_deleted_ones(served: Feed) -> None:
    served.describe("empty")
    served.reward("empty", 1.0)
    assert served.client.post("/v1/sessions/empty/end").json()["finished"] is False
    unknown = served.client.post("/v1/sessions/unknown/end")
    assert (unknown.status_code, unknown.json()["finished"]) == (200, False)
    for name in ("a", "b"):
        served.finish(name)
    served.client.delete("/v1/sessions/a")
    assert served.names() == ["b"]


def test_idle_rollouts_are_finished(engine: FakeVllm) -> None:
    with run_proxy([engine], store="memory:", finish_after_s=0.4) as client:
        served = Feed(client)
        answer = client.post(CHAT, json={"messages": [user("Hi")]})
        page = served.read(wait=20)
        assert [(each["rollout"], each["cause"]) for each in page["data"]] == [
            (answer.headers["x-session-id"], "idle")
        ]
        cursor = page["cursor"]
        served.reward(page["data"][0]["rollout"], 1.0)
        again = served.read(wait=20, after=cursor)["data"][0]
        assert (again["revision"], again["samples"][0]["reward"]) == (2, 1.0)


# --- consumers


def test_a_consumer_continues_after_what_it_acknowledged(served: Feed) -> None:
    for number in range(4):
        served.finish(f"r{number}")
    page = served.read(consumer="c", limit=2)
    assert served.names(consumer="c", limit=2) == ["r0", "r1"]  # reading acknowledges nothing
    assert served.names(consumer="c", after=page["cursor"]) == ["r2", "r3"]
    assert served.acknowledge("c", page["data"][0]["cursor"]) == page["data"][0]["cursor"]
    assert served.names(consumer="c") == ["r1", "r2", "r3"]
    served.acknowledge("c", page["cursor"])
    assert served.acknowledge("c", "1") == page["cursor"]
    assert served.names(consumer="c") == ["r2", "r3"]
    assert served.names(consumer="other") == ["r0", "r1", "r2", "r3"]
    assert served.names(consumer="c", after="0", limit=1) == ["r0"]
    described = served.consumers()
    assert [(each["consumer"], each["waiting"]) for each in described] == [("c", 2), ("other", 4)]
    assert described[0]["cursor"] == page["cursor"]
    oldest = served.read()["data"][2]
    assert described[0]["oldest"] == oldest["finished"]
    assert served.client.delete(f"{FEED}/consumers/c").json() == {"consumer": "c", "deleted": True}
    assert served.names(consumer="c", limit=1) == ["r0"]


def test_a_cursor_beyond_the_end_is_the_end(served: Feed) -> None:
    """As that of a reader whose store was lost."""
    served.finish("a")
    end = served.read()["cursor"]
    assert served.read(after="9" * 18)["cursor"] == end
    assert served.acknowledge("c", "9" * 18) == end
    served.finish("b")
    assert served.names(consumer="c") == ["b"]


def test_an_unknown_consumer_cannot_be_removed(served: Feed) -> None:
    answer = served.client.delete(f"{FEED}/consumers/nobody")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "consumer_not_found")


def test_consumers_are_limited(served: Feed) -> None:
    for number in range(MOST_CONSUMERS):
        served.acknowledge(f"c{number}", "0")
    for answer in (
        served.client.get(FEED, params={"consumer": "new"}),
        served.client.post(f"{FEED}/ack", json={"consumer": "new", "cursor": "0"}),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (
            400,
            "too_many_consumers",
            "consumer",
        )
    served.acknowledge("c0", "0")
    assert served.read(consumer="c1")["data"] == []


def test_metrics_show_what_consumers_have_not_acknowledged(
    engine: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_tasks, "REPORT_S", 0.02)
    with run_proxy([engine], store="memory:") as client:
        served = Feed(client)
        cursors = []
        for number in range(3):
            served.finish(f"r{number}")
            cursors.append(served.read()["cursor"])
        served.acknowledge("c", cursors[0])

        def waiting() -> float:
            return Scrape(client).value("feed_waiting_rollouts", consumer="c")

        wait_until(lambda: waiting() == 2)
        age = Scrape(client).value("feed_oldest_seconds", consumer="c")
        assert 0 < age <= time.time() - int(cursors[1]) / 1e6
        served.acknowledge("c", cursors[2])
        wait_until(lambda: waiting() == 0)
        assert Scrape(client).value("feed_oldest_seconds", consumer="c") == 0
        client.delete(f"{FEED}/consumers/c")
        wait_until(lambda: 'consumer="c"' not in client.get("/metrics").text)


def test_rollouts_lost_to_a_consumer_are_counted(engine: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.history.pins.LEASE_S", 0.0)
    with run_proxy([engine], store="memory:", store_max_bytes=20_000) as client:
        served = Feed(client)
        served.finish("read")
        served.acknowledge("c", served.read()["cursor"])
        served.finish("lost")
        number = 0
        while client.get("/v1/sessions/lost").status_code == 200:
            served.turn(f"more-{number}")
            number += 1
        scrape = Scrape(client)
        assert scrape.value("feed_lost_rollouts_total") == 1
        assert scrape.value("evicted_rollouts_total") >= 2
        assert served.names() == []


# --- filters


def test_metadata_select_rollouts(served: Feed) -> None:
    served.finish("a", env="math", split=1, gold=True)
    served.finish("b", env="code", split=1)
    served.finish("c", env="math", split=2, note="x=y z")
    served.finish("d")
    for conditions, names in [
        (["env=math"], ["a", "c"]),
        (["split=1"], ["a", "b"]),
        (["env=math", "split=1"], ["a"]),
        (["gold=true"], ["a"]),
        (["note=x=y z"], ["c"]),
        (["env="], []),
        (["none=1"], []),
    ]:
        page = served.read(metadata=conditions)
        assert [each["rollout"] for each in page["data"]] == names, conditions
        # what was left out need not be looked at again
        assert page["cursor"] == served.read()["cursor"]


def test_metadata_are_compared_as_json(served: Feed) -> None:
    served.finish("whole", n=1, nested={"a": [1, {"b": 2.0}]})
    served.finish("float", n=1.0, nested={"a": [1.0, {"b": 2}]})
    served.finish("text", n="1", nested="[]")
    served.finish("true", n=True, nested=None)
    for condition, names in [
        ("n=1", ["whole", "float", "text"]),
        ("n=1.0", ["whole", "float"]),
        ("n=10e-1", ["whole", "float"]),
        ("n=true", ["true"]),
        ("n=1.5", []),
        ("n=one", []),
        ('nested={"a": [1, {"b": 2}]}', ["whole", "float"]),
        ('nested={"a": [true, {"b": 2}]}', []),
        ('nested={"a": [1]}', []),
        ("nested=[]", ["text"]),
        ("nested=null", ["true"]),
        ("nested=" + "[" * 5000, []),
    ]:
        assert served.names(metadata=condition) == names, condition


def test_few_that_fit_among_many(served: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "ENTRIES_AT_ONCE", 2)
    monkeypatch.setattr(feed, "MOST_SCANNED", 4)
    for number in range(6):
        served.finish(f"r{number}", wanted=number == 5)
    page = served.read(metadata="wanted=true")
    assert (page["data"], page["more"]) == ([], True)
    assert served.names(metadata="wanted=true", after=page["cursor"]) == ["r5"]
    assert served.names(metadata="wanted=true", wait=10) == ["r5"]


def test_samples_of_unknown_weights_are_left_out(served: Feed) -> None:
    served.finish("a")
    page = served.read(weight_version=["7", "8"])
    assert (page["data"], page["cursor"]) == ([], served.read()["cursor"])


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_layouts(served: Feed, layout: str) -> None:
    served.finish("a")
    [rollout] = served.read(layout=layout)["data"]
    expected = served.client.get("/v1/sessions/a/samples", params={"layout": layout}).json()["samples"]
    revision = {"revision": 1} if layout == "plain" else {}
    assert [{**sample, **revision} for sample in expected] == rollout["samples"]


def test_a_response_is_limited_in_ids(served: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MOST_IDS", 1)
    for name in ("a", "b"):
        served.finish(name)
    page = served.read()
    assert ([each["rollout"] for each in page["data"]], page["more"]) == (["a"], True)
    assert served.names(after=page["cursor"]) == ["b"]


_BAD: dict[str, tuple[str, str, Any, str]] = {
    "no limit": ("GET", "?limit=0", None, "limit"),
    "a limit too high": ("GET", "?limit=1001", None, "limit"),
    "a limit in words": ("GET", "?limit=all", None, "limit"),
    "a wait too long": ("GET", "?wait=301", None, "wait"),
    "a wait that ended before": ("GET", "?wait=-1", None, "wait"),
    "an endless wait": ("GET", "?wait=inf", None, "wait"),
    "a wait in words": ("GET", "?wait=abc", None, "wait"),
    "no number to wait": ("GET", "?wait=nan", None, "wait"),
    "a wait without a value": ("GET", "?wait=", None, "wait"),
    "a negative limit": ("GET", "?limit=-1", None, "limit"),
    "half a rollout": ("GET", "?limit=1.5", None, "limit"),
    "a limit without a value": ("GET", "?limit", None, "limit"),
    "an unknown parameter": ("GET", "?limit=1&weights=7", None, "weights"),
    "an unknown parameter without a value": ("GET", "?Limit=", None, "Limit"),
    "two limits": ("GET", "?limit=1&limit=2", None, "limit"),
    "no class": ("GET", "?class=", None, "class"),
    "no version": ("GET", "?weight_version=7&weight_version=", None, "weight_version"),
    "a cursor in words": ("GET", "?after=now", None, "after"),
    "a cursor before the first": ("GET", "?after=-1", None, "after"),
    "a cursor too long": ("GET", f"?after={'1' * 19}", None, "after"),
    "a condition without a value": ("GET", "?metadata=env", None, "metadata"),
    "a condition without a key": ("GET", "?metadata=%3Dmath", None, "metadata"),
    "an unknown layout": ("GET", "?layout=other", None, "layout"),
    "shared by two": ("GET", "?shared=twice", None, "shared"),
    "a consumer that is no name": ("GET", "?consumer=a%20b", None, "consumer"),
    "nobody acknowledges": ("POST", "/ack", {"cursor": "1"}, "consumer"),
    "nothing is acknowledged": ("POST", "/ack", {"consumer": "c"}, "cursor"),
    "a number is acknowledged": ("POST", "/ack", {"consumer": "c", "cursor": 1}, "cursor"),
    "no cursor is acknowledged": ("POST", "/ack", {"consumer": "c", "cursor": "x"}, "cursor"),
    "no name acknowledges": ("POST", "/ack", {"consumer": "", "cursor": "1"}, "consumer"),
    "no object": ("POST", "/ack", [], "body"),
}


@pytest.mark.parametrize("method, path, body, param", _BAD.values(), ids=_BAD)
def test_bad_requests(client: httpx.Client, method: str, path: str, body: Any, param: str) -> None:
    answer = client.request(method, FEED + path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


# --- tenants


def test_a_tenant_reads_only_its_own_rollouts(engine: FakeVllm) -> None:
    with run_proxy([engine], store="memory:", api_key=["one", "two"], admin_key=["three"]) as client:
        one, two, three = (Feed(client, key) for key in ("one", "two", "three"))
        one.finish("same")
        two.finish("same")
        one.finish("more")
        assert one.names() == ["same", "more"]
        assert two.names(consumer="c") == ["same"]
        assert three.names() == []
        two.acknowledge("c", two.read()["cursor"])
        assert one.names(consumer="c") == ["same", "more"]
        assert [each["waiting"] for each in one.consumers()] == [2]
        assert [each["waiting"] for each in two.consumers()] == [0]
        assert three.consumers() == []
        refused = client.delete(f"{FEED}/consumers/c", headers=three.headers)
        assert refused.status_code == 404
        assert json.dumps(one.read()).find("one") == -1
