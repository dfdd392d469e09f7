"""The application as a whole: its OpenAPI page, unexpected errors, the order in which it closes."""

from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from proxy import __version__
from proxy.app import create_app, running
from proxy.fleet.admin_calls import ADMIN_CALLS
from proxy.settings import Settings
from proxy.turn.services import Services
from tests.support.fake_vllm import FakeVllm
from tests.support.utils import run_server


@pytest.fixture
def page(client: httpx.Client) -> Any:
    return client.get("/openapi.json").json()


def test_the_page_shows_the_routes_of_the_proxy(page: Any) -> None:
    assert page["info"] == {"title": "tokenproxy", "version": __version__}
    assert set(page["paths"]) == {
        *("/v1/chat/completions", "/v1/chat/completions/tokens", "/tokenize"),
        *("/v1/completions", "/inference/v1/generate"),
        *("/", "/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/responses", "/v1/responses/compact", "/v1/responses/{response_id}"),
        *("/v1/sessions", "/v1/sessions/{session}"),
        *("/v1/sessions/{session}/samples", "/v1/sessions/{session}/reward"),
        "/v1/sessions/{session}/traces",
        *("/v1/sessions/{session}/end", "/finish_session"),
        *("/v1/samples", "/v1/samples/ack", "/v1/samples/consumers", "/v1/samples/consumers/{consumer}"),
        *("/admin/replicas", "/admin/replicas/drain"),
        *("/generate", "/chat"),
        *("/ready", "/health", "/metrics"),
        *(call.path for call in ADMIN_CALLS),
    }


def test_root_path_of_another_proxy_is_removed(fake: FakeVllm) -> None:
    app = create_app(Settings(upstreams=[fake.url]))
    with run_server(app, root_path="/prefix") as url:
        assert httpx.get(f"{url}/v1/models?a=1", trust_env=False).status_code == 200
    assert "/v1/models?a=1" in [seen.target for seen in fake.requests]


def test_an_unexpected_error_is_an_error_object(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*args: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("proxy.routes.turns.TurnRoute.answer", fail)
    answer = client.post("/v1/chat/completions/tokens", json={})
    assert answer.status_code == 500
    assert list(answer.json()["error"]) == ["message", "type", "param", "code"]
    assert "secret detail" not in answer.text


async def test_admin_calls_end_before_the_store_that_they_write_to_is_closed() -> None:
    closed: list[str] = []

    def part(name: str, **attributes: Any) -> Any:
        async def end() -> None:
            closed.append(name)

        return SimpleNamespace(stop=end, aclose=end, shutdown=lambda: closed.append(name), **attributes)

    async def done() -> None:
        pass

    tasks = SimpleNamespace(run_forever=lambda work: work.close())
    services = SimpleNamespace(
        encoders=part("encoders"),
        fleet=part("fleet", start=lambda: None, weights=part("weights")),
        admin_calls=part("admin calls"),
        history=part("store", open=done, tasks=tasks, metrics=None),
    )
    async with running(cast(Services, services)):
        assert closed == []
    assert closed == ["admin calls", "weights", "store", "fleet", "encoders"]
