import httpx
import pytest

from proxy.routes.auth import OPEN_PATHS
from proxy.settings import Settings
from tests.fake_vllm import FakeVllm
from tests.utils import run_app, run_proxy, wait_until

_BODY = {"messages": [{"role": "user", "content": "Hi"}]}
_BEARER = {"authorization": "Bearer secret"}
_ROUTES = ["/v1/chat/completions", "/v1/chat/completions/tokens", "/tokenize"]


@pytest.mark.parametrize("path", _ROUTES)
def test_the_key_is_wanted_and_stays_here(mortal: FakeVllm, path: str) -> None:
    with run_proxy([mortal], api_key="secret") as client:
        mortal.requests.clear()
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            refused = client.post(path, json=_BODY, headers=headers)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert not any(seen.method == "POST" for seen in mortal.requests)
        assert client.post(path, json=_BODY, headers=_BEARER).status_code == 200
    assert mortal.seen("/v1/chat/completions") or mortal.seen("/tokenize")
    assert all(seen.header("authorization") is None for seen in mortal.requests)


def test_the_name_of_the_scheme_may_be_written_in_any_case(mortal: FakeVllm) -> None:
    with run_proxy([mortal], api_key="secret") as client:
        assert client.get("/v1/models", headers={"authorization": "bearer secret"}).status_code == 200


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_what_probes_and_scrapers_ask_for_is_open(mortal: FakeVllm, path: str) -> None:
    with run_proxy([mortal], api_key="secret") as client:
        assert client.get(path).status_code != 401


@pytest.mark.parametrize(
    "method, path", [("GET", "/v1/models"), ("GET", "/openapi.json"), ("POST", "/anything")]
)
def test_everything_else_is_closed(mortal: FakeVllm, method: str, path: str) -> None:
    with run_proxy([mortal], api_key="secret") as client:
        assert client.request(method, path).status_code == 401


def test_without_a_key_of_ours_the_clients_goes_to_the_engine(fake: FakeVllm, client: httpx.Client) -> None:
    client.post("/v1/chat/completions/tokens", json=_BODY, headers=_BEARER)
    assert fake.last().header("authorization") == b"Bearer secret"


def test_the_engines_key_replaces_the_clients(mortal: FakeVllm) -> None:
    mortal.api_key = "engine"
    with run_proxy([mortal], upstream_api_key="engine") as client:
        assert client.post("/v1/chat/completions/tokens", json=_BODY, headers=_BEARER).status_code == 200
    assert {seen.header("authorization") for seen in mortal.requests} == {b"Bearer engine"}


def test_an_engine_that_wants_a_key_is_reported(mortal: FakeVllm) -> None:
    mortal.api_key = "engine"
    with run_app(Settings(upstreams=[mortal.url])) as client:
        wait_until(lambda: mortal.seen("/v1/models"))
        wait_until(lambda: "not asked" not in client.get("/ready").text)
        [engine] = client.get("/ready").json()["engines"]
    assert engine["ready"] is False
    assert "set `upstream_api_key`" in engine["problem"]
