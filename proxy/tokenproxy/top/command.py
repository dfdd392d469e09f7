"""The loop of `tokenproxy top`."""

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext

import httpx
from rich.console import Console, RenderableType
from rich.live import Live

from tokenproxy.base.errors import UsageError
from tokenproxy.base.urls import normalise_base_url
from tokenproxy.top.snapshot import Snapshot, Unreachable, take
from tokenproxy.top.view import render, render_problem

_WIDTH = 160
"""Number of columns if stdout is not a terminal."""


def run_top(options: argparse.Namespace) -> int:
    """Show a proxy until Ctrl-C, or once; returns the exit code.

    If the proxy does not respond, the request is repeated. With `--once` that is an error: code 1.

    Raises:
        UsageError: `--url` is not a URL.
    """
    try:
        root = normalise_base_url(options.url)
    except ValueError as error:
        raise UsageError(str(error)) from error
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    try:
        return asyncio.run(_run(root, options.api_key, options.interval, console, once=options.once))
    except KeyboardInterrupt:
        return 0


async def _run(url: str, api_key: str | None, interval_s: float, console: Console, *, once: bool) -> int:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    is_live = console.is_terminal and not once
    live = Live(console=console, auto_refresh=False, screen=True) if is_live else None
    async with httpx.AsyncClient(headers=headers, trust_env=False, timeout=None) as client:
        with live or nullcontext():
            async for view, problem in _views(client, url, interval_s):
                if live is not None:
                    live.update(view, refresh=True)
                else:  # one view after the other, as `top -b` writes them
                    console.print(view)
                if once:
                    return 1 if problem else 0
    return 0


async def _views(
    client: httpx.AsyncClient, url: str, interval_s: float
) -> AsyncIterator[tuple[RenderableType, str]]:
    """Views without end, each with the problem of the proxy that it shows; empty if it responds."""
    before: Snapshot | None = None
    now: Snapshot | None = None
    while True:
        problem = ""
        try:
            before, now = now, await take(client, url)
        except Unreachable as error:
            problem = str(error)
        yield (render(url, now, before, problem) if now else render_problem(url, problem)), problem
        await asyncio.sleep(interval_s)
