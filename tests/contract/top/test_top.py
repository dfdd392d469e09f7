"""`tokenproxy top` and a real proxy."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from io import StringIO

import httpx
import pytest
from prometheus_client.samples import Sample
from rich.console import Console, RenderableType

from tests.support.fake_vllm import FakeVllm
from tests.support.ports import held_port
from tests.support.scraping import Scrape
from tests.support.talk import CHAT, Talk, user
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy, wait_until
from tokenproxy.cli.main import main
from tokenproxy.top.command import _views
from tokenproxy.top.snapshot import Snapshot, quantile

Capture = pytest.CaptureFixture[str]


def _top(client: httpx.Client, capsys: Capture, *flags: str) -> str:
    assert main(["top", "--once", "--url", str(client.base_url), *flags]) == 0
    return capsys.readouterr().out


def _text(view: RenderableType) -> str:
    console = Console(width=160, file=StringIO(), record=True)
    console.print(view)
    return console.export_text()


def test_once(talk: Callable[..., Talk], client: httpx.Client, fake: FakeVllm, capsys: Capture) -> None:
    conversation = talk(headers={"x-session-id": "the-session"})
    conversation.ask()
    conversation.follow(user("And?"))
    seen = _top(client, capsys)
    assert re.search(rf"(?m)^{fake.url} .*ready +tiny +chat +ready +0 +\d+ *$", seen)
    assert re.search(r"(?m)^the-session +2 ", seen)
    scrape = Scrape(client)
    for kind in ("reused", "appended", "rendered"):
        assert re.search(rf"{kind} {scrape.value('prompt_ids_total', kind=kind):,.0f} \(\d+%\)", seen)
    assert f"first_turn {scrape.value('prompts_total', reason='first_turn'):,.0f}" in seen
    assert f"extended {scrape.value('prompts_total', source='extended'):,.0f}" in seen


def test_keys_and_a_replica_that_is_down(tiny_model: TinyModel, capsys: Capture) -> None:
    with FakeVllm(tiny_model) as fake, run_proxy([fake], api_key=["k"], store="memory:") as client:
        headers = {"authorization": "Bearer k", "x-session-id": "mine"}
        client.post(CHAT, json={"messages": [user("Hi")]}, headers=headers)
        assert "pass --api-key KEY" in _top(client, capsys)
        assert re.search(r"(?m)^mine +1 ", _top(client, capsys, "--api-key", "k"))
        fake.healthy = False
        wait_until(lambda: client.get("/ready").status_code == 503)
        assert re.search(rf"(?m)^{fake.url} +down .*/health", _top(client, capsys, "--api-key", "k"))


def test_once_without_a_proxy(fake: FakeVllm, capsys: Capture) -> None:
    with held_port() as port:
        assert main(["top", "--once", "--url", f"http://127.0.0.1:{port}/v1/"]) == 1
    assert f"nothing responds at http://127.0.0.1:{port}:" in capsys.readouterr().out
    assert main(["top", "--once", "--url", fake.url]) == 1
    assert "is not a tokenproxy: GET /ready returned 404" in capsys.readouterr().out


class _Breakable(httpx.AsyncHTTPTransport):
    """Connections to a proxy that can be down."""

    down = True

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.down:
            raise httpx.ConnectError("refused")
        return await super().handle_async_request(request)


async def test_it_keeps_trying(client: httpx.Client, fake: FakeVllm) -> None:
    transport, url = _Breakable(), str(client.base_url).rstrip("/")
    async with httpx.AsyncClient(transport=transport) as breakable:
        views = _views(breakable, url, 0.0)
        assert f"nothing responds at {url}: refused" in _text((await anext(views))[0])
        transport.down = False
        assert re.search(rf"(?m)^{fake.url} +ready", _text((await anext(views))[0]))
        transport.down = True
        old = _text((await anext(views))[0])
    assert re.search(rf"the values below are old; trying again.*{fake.url} +ready", old, re.DOTALL)


def test_the_loop_in_a_terminal(client: httpx.Client, fake: FakeVllm) -> None:
    ours, its = pty.openpty()
    seen = bytearray()

    def shows(words: str) -> bool:
        if select.select([ours], [], [], 0.05)[0]:
            seen.extend(os.read(ours, 65536))
        return words.encode() in seen

    command = [sys.executable, "-m", "tokenproxy", "top", "--url", str(client.base_url), "--interval", "0.1"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "50"}
    with subprocess.Popen(command, stdout=its, env=environment) as process:
        try:
            wait_until(lambda: shows(fake.url))
            wait_until(lambda: shows("requests/s"))  # the second look has speeds
            process.send_signal(signal.SIGINT)
            # it draws until it ends, and what nobody reads would block it
            wait_until(lambda: shows("") and process.poll() is not None)
            assert process.returncode == 0
        finally:
            process.kill()
            os.close(its)
            os.close(ours)
    assert b"\x1b[?1049h" in seen  # a screen of its own


def _histogram(at: float, counts: dict[str, float]) -> Snapshot:
    samples = [Sample("tokenproxy_x_bucket", {"le": le}, count) for le, count in counts.items()]
    return Snapshot(at, [], [], "", {"x_bucket": samples})


def test_quantiles() -> None:
    before = _histogram(0, {"0.1": 100.0, "0.2": 100.0, "+Inf": 100.0})
    now = _histogram(1, {"0.1": 100.0, "0.2": 104.0, "+Inf": 108.0})
    assert quantile(now, before, "x", 0.5) == pytest.approx(0.2)
    assert quantile(now, before, "x", 0.99) == 0.2  # there is no value beyond the last edge
    assert quantile(now, now, "x", 0.5) is None
