"""The application as a whole: its OpenAPI page, the order in which it closes."""

import re
from types import SimpleNamespace
from typing import Any, cast

import httpx

from tests.support.fake_vllm import FakeVllm
from tests.support.utils import run_server
from tokenproxy import __version__
from tokenproxy.app.app import create_app, running
from tokenproxy.settings import Settings
from tokenproxy.turn.services import Services
from tokenproxy.web.routes import all_routes


def test_the_page_shows_the_routes_of_the_proxy(client: httpx.Client) -> None:
    page = client.get("/openapi.json").json()
    assert page["info"] == {"title": "tokenproxy", "version": __version__}
    own = {
        (route.path, method.lower())
        for route in all_routes()
        if not route.catches_all and "viewer" not in route.path
        for method in route.methods
        if method != "HEAD"
    }
    operations = {
        (path, method): operation for path, of in page["paths"].items() for method, operation in of.items()
    }
    assert set(operations) == own
    for (path, _), operation in operations.items():
        assert [each["name"] for each in operation["parameters"]] == re.findall(r"{(\w+)}", path)


def test_root_path_of_another_proxy_is_removed(fake: FakeVllm) -> None:
    app = create_app(Settings(upstreams=[fake.url]))
    with run_server(app, root_path="/prefix") as url:
        assert httpx.get(f"{url}/v1/models?a=1", trust_env=False).status_code == 200
    assert "/v1/models?a=1" in [seen.target for seen in fake.requests]


async def test_admin_calls_end_before_the_store_that_they_write_to_is_closed() -> None:
    closed: list[str] = []

    def part(name: str, **attributes: Any) -> Any:
        async def end() -> None:
            closed.append(name)

        return SimpleNamespace(stop=end, aclose=end, shutdown=lambda: closed.append(name), **attributes)

    async def done() -> None:
        pass

    services = SimpleNamespace(
        encoders=part("encoders"),
        fleet=part("fleet", start=lambda: None, watch=part("watch")),
        admin_calls=part("admin calls"),
        history=part("store", open=done, metrics=SimpleNamespace(tick=None)),
    )
    async with running(cast(Services, services)):
        assert closed == []
    assert closed == ["admin calls", "watch", "store", "fleet", "encoders"]
