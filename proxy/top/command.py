"""The loop of `tokenproxy top`."""

import asyncio
from collections.abc import AsyncIterator

import httpx
from rich.console import Console, RenderableType
from rich.live import Live

from proxy.top.snapshot import Snapshot, Unreachable, take
from proxy.top.view import render, render_problem
from proxy.urls import normalise_base_url

_WIDTH = 160
"""Number of columns if stdout is not a terminal."""


def run_top(url: str, api_key: str | None, interval_s: float, *, once: bool) -> int:
    """Show a proxy until Ctrl-C, or once; returns the exit code.

    If the proxy does not respond, the request is repeated. With `once` that is an error: code 1.

    Raises:
        ValueError: `url` is not a URL.
    """
    root = normalise_base_url(url)
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    try:
        if once:
            return asyncio.run(_once(root, api_key, console))
        asyncio.run(_forever(root, api_key, interval_s, console))
    except KeyboardInterrupt:
        pass
    return 0


async def _once(url: str, api_key: str | None, console: Console) -> int:
    async with _client(api_key) as client:
        try:
            snapshot = await take(client, url)
        except Unreachable as error:
            console.print(render_problem(url, str(error)))
            return 1
    console.print(render(url, snapshot, None))
    return 0


async def _forever(url: str, api_key: str | None, interval_s: float, console: Console) -> None:
    async with _client(api_key) as client:
        if not console.is_terminal:  # one view after the other, as `top -b` writes them
            async for view in _views(client, url, interval_s):
                console.print(view)
            return
        with Live(console=console, auto_refresh=False, screen=True) as live:
            async for view in _views(client, url, interval_s):
                live.update(view, refresh=True)


async def _views(client: httpx.AsyncClient, url: str, interval_s: float) -> AsyncIterator[RenderableType]:
    """Views without end."""
    before: Snapshot | None = None
    now: Snapshot | None = None
    while True:
        try:
            before, now = now, await take(client, url)
            yield render(url, now, before)
        except Unreachable as error:
            yield render(url, now, before, str(error)) if now else render_problem(url, str(error))
        await asyncio.sleep(interval_s)


def _client(api_key: str | None) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.AsyncClient(headers=headers, trust_env=False, timeout=None)
