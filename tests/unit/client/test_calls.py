"""The client without any input or output: its members, addresses, errors and patience."""

import inspect
import subprocess
import sys
import types
from pathlib import Path

import httpx
import pytest

import tokenproxy.client
from tokenproxy.client import (
    AccessDenied,
    AsyncClient,
    Client,
    ErrorResponse,
    InvalidRequest,
    KeyRefused,
    NoResponse,
    ServerFailure,
    TemporaryFailure,
    TooManyRequests,
    UnknownResource,
)
from tokenproxy.client.calls import Address, Patience, models, read_feed, repeatable
from tokenproxy.client.errors import error_of

_ROOT = Path(__file__).parents[3]


def test_all_is_every_public_name() -> None:
    public = [
        name
        for name, value in vars(tokenproxy.client).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    ]
    assert sorted(public) == tokenproxy.client.__all__


def test_errors_and_methods_are_documented() -> None:
    page = (_ROOT / "docs" / "feed.md").read_text()
    client = tokenproxy.client
    errors = [name for name in client.__all__ if issubclass(getattr(client, name), Exception)]
    methods = [name for name in vars(Client) if not name.startswith("_") and name != "close"]
    assert [name for name in [*errors, *methods] if f"`{name}`" not in page and name != "ErrorResponse"] == []


def test_both_clients_have_the_same_methods() -> None:
    def signatures(kind: type) -> dict[str, str]:
        methods = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
        return {
            name: str(inspect.signature(value)).replace("AsyncIterator", "Iterator")
            for name, value in methods.items()
            if name not in ("close", "aclose")
        }

    assert signatures(Client) == signatures(AsyncClient)


def test_import_loads_nothing_else_of_the_proxy() -> None:
    names = ["fastapi", "transformers", "uvicorn", "redis", "aiohttp"]
    program = (
        "import sys, tokenproxy.client;"
        f"print([n for n in {names} if n in sys.modules],"
        "[n for n in sys.modules if n.startswith('proxy.') and not n.startswith('tokenproxy.client')])"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[] []"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((401, KeyRefused), (403, AccessDenied), (404, UnknownResource), (413, InvalidRequest)),
        *((429, TooManyRequests), (503, TemporaryFailure), (504, ServerFailure)),
    ],
)
def test_statuses(status: int, kind: type[ErrorResponse]) -> None:
    body = {"error": {"message": "m", "type": "t", "param": "p", "code": "c"}}
    error = error_of(httpx.Response(status, json=body, headers={"retry-after": "2"}))
    assert type(error) is kind
    found = (error.message, error.status, error.param, error.code, error.retry_after_s)
    assert found == ("m", status, "p", "c", 2.0)
    assert str(error_of(httpx.Response(status, text="bad gateway"))) == "bad gateway"
    assert str(status) in str(error_of(httpx.Response(status)))


def test_base_urls() -> None:
    urls = ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/")
    assert {Address(url, None).url for url in urls} == {"http://h:1"}
    assert Address("http://h:1", "key").arguments(models())["headers"] == {"authorization": "Bearer key"}


def test_every_page_of_a_feed_is_selected_by_the_same_weights() -> None:
    selection = repeatable({"weight_versions": iter(["7", "8"]), "classes": iter(["main"])})
    for _ in range(2):
        query = read_feed("trainer", **selection).query
        selected = [value for name, value in query if name in ("weight_version", "class")]
        assert selected == ["7", "8", "main"]


def test_patience_ends_and_waits_as_long_as_the_proxy_asks() -> None:
    now = [0.0]
    patience = Patience(10.0, lambda: now[0])
    pauses = []
    error = TemporaryFailure("m", 503, retry_after_s=2.0)
    for _ in range(3):
        pauses.append(patience.pause(error))
        now[0] += pauses[-1]
    assert pauses == [2.0, 2.0, 2.0]
    assert patience.pause(NoResponse("m")) == 4.0
    now[0] = 10.0
    with pytest.raises(TemporaryFailure):
        patience.pause(error)
    with pytest.raises(InvalidRequest):
        Patience(10.0, lambda: 0.0).pause(InvalidRequest("m", 400))
