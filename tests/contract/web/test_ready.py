import httpx

from tests.support.fake_vllm import FakeVllm
from tests.support.utils import run_app, wait_until
from tokenproxy.settings import Settings

_DOWN = "http://127.0.0.1:9"


def test_an_engine_that_is_ready(fake: FakeVllm, client: httpx.Client) -> None:
    answer = client.get("/ready")
    assert answer.status_code == client.head("/ready").status_code == 200
    found = answer.json()
    [engine] = found["engines"]
    assert engine["template"]["after_messages"] == engine["template"]["after_results"] == "new messages"
    expected = {
        **{"engine": fake.url, "ready": True, "version": "0.32.0+fake", "model": "tiny"},
        **{"token_in": "chat", "append": "ready", "breaker": "closed", "draining": False, "requests": 0},
    }
    assert engine.items() >= expected.items()
    assert (found["ready"], found["store"]["state"], found["store"]["lost_turns"]) == (True, "ok", 0)


def test_engines_that_are_down(mortal: FakeVllm) -> None:
    with run_app(Settings(upstreams=[_DOWN, mortal.url], watch_interval_s=0.1)) as client:
        wait_until(lambda: client.get("/ready").status_code == 200)
        assert [engine["ready"] for engine in client.get("/ready").json()["engines"]] == [False, True]
        mortal.kill()
        wait_until(lambda: client.get("/ready").status_code == 503)
        answer = client.get("/ready").json()
        assert (answer["ready"], answer["engines"][0]["engine"]) == (False, _DOWN)
        assert "no engine responds" in answer["engines"][0]["problem"]
        assert client.get("/health").json() == {"status": "ok"}


def test_health_is_that_of_this_process(client: httpx.Client, fake: FakeVllm) -> None:
    fake.healthy = False
    assert client.get("/health").status_code == client.head("/health").status_code == 200
    assert not [seen for seen in fake.seen("/health") if seen.method == "HEAD"]
