"""Images from the web: only from hosts that are allowed, never from private addresses, within limits."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from tokenproxy.base.image_fetch import ImageFetcher, public_address
from tokenproxy.base.images import InvalidImage

_BODY = b"picture"


async def _picture(request: web.Request) -> web.StreamResponse:
    assert request.headers["host"].startswith("images.example")
    name = request.match_info["name"]
    moved = {"moved": "/picture", "elsewhere": "http://other.example/picture", "around": "/around"}
    if name in moved:
        raise web.HTTPFound(moved[name])
    if name == "missing":
        raise web.HTTPNotFound
    if name == "slow":
        await asyncio.Event().wait()
    return web.Response(body=_BODY * 100 if name == "large" else _BODY)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_get("/{name}", _picture)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield runner.addresses[0][1]
    await runner.cleanup()


def _fetcher(port: int, *hosts: str, timeout_s: float = 5.0) -> ImageFetcher:
    async def local(host: str, asked: int) -> str:
        assert asked in (port, 80)
        return "127.0.0.1"

    return ImageFetcher(hosts or ("images.example",), 100, timeout_s, local)


async def test_an_image_of_an_allowed_host_is_loaded(port: int) -> None:
    for name in ("picture", "moved"):
        assert await _fetcher(port).fetch(f"http://images.example:{port}/{name}") == _BODY
    assert await _fetcher(port, ".example").fetch(f"http://IMAGES.example:{port}/picture") == _BODY


@pytest.mark.parametrize(
    "name, problem",
    [
        ("missing", "status 404"),
        ("large", "more than 100 bytes"),
        ("around", "too many redirects"),
        ("elsewhere", "not loaded from 'other.example'"),
        ("slow", "within 0.05 s"),
    ],
)
async def test_what_went_wrong_is_told(port: int, name: str, problem: str) -> None:
    with pytest.raises(InvalidImage, match=problem):
        timeout_s = 0.05 if name == "slow" else 5.0
        await _fetcher(port, timeout_s=timeout_s).fetch(f"http://images.example:{port}/{name}")


@pytest.mark.parametrize(
    "url, problem",
    [
        ("http://other.example/x", "not loaded from 'other.example'"),
        ("http://badsub.example/x", "not loaded from"),
        ("ftp://images.example/x", "http"),
        ("http://user:key@images.example/x", "credentials"),
        ("http://[::1/x", "could not be loaded"),
    ],
)
async def test_urls_that_are_not_loaded(url: str, problem: str) -> None:
    async def local(host: str, port: int) -> str:
        return "127.0.0.1"

    with pytest.raises(InvalidImage, match=problem):
        await ImageFetcher(["images.example", ".sub.example"], 100, 5.0, local).fetch(url)


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "fec0::1"),
        *("::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::a00:1", "2002:a00:1::1", "::127.0.0.1"),
    ],
)
async def test_private_addresses_are_refused(host: str) -> None:
    """Also those inside addresses of other kinds."""
    with pytest.raises(InvalidImage, match="private address"):
        await public_address(host, 80)


@pytest.mark.parametrize("host", ["93.184.215.14", "2606:2800:21f::1", "64:ff9b::5db8:d70e"])
async def test_a_public_address_is_found(host: str) -> None:
    assert await public_address(host, 80) == host
