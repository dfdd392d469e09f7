"""`tokenproxy top` and a real proxy."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import httpx
import pytest
from prometheus_client.samples import Sample
from rich.console import Console

from proxy.cli import main
from proxy.ports import free_port
from proxy.top.snapshot import Snapshot, quantile
from proxy.top.view import render
from tests.support.fake_vllm import Canned, FakeVllm
from tests.support.scraping import Scrape
from tests.support.talk import CHAT, Talk, user
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy, wait_until

Capture = pytest.CaptureFixture[str]


def _top(client: httpx.Client, capsys: Capture, *flags: str) -> str:
    assert main(["top", "--once", "--url", str(client.base_url), *flags]) == 0
    return capsys.readouterr().out


def test_once(
    talk: Callable[..., Talk], client: httpx.Client, fake: FakeVllm, tiny_model: TinyModel, capsys: Capture
) -> None:
    conversation = talk(headers={"x-session-id": "the-session"})
    conversation.ask()
    conversation.follow(user("And?"))
    seen = _top(client, capsys)
    lines = seen.splitlines()
    [replica] = [line for line in lines if line.startswith(fake.url)]
    assert re.search(r"ready +tiny +chat +ready +0 +\d+$", replica.rstrip())
    [session] = [line for line in lines if line.startswith("the-session")]
    assert re.search(r"the-session +2 ", session)
    scrape = Scrape(client)
    for kind in ("reused", "appended", "rendered"):
        assert re.search(rf"{kind} {scrape.value('prompt_ids_total', kind=kind):,.0f} \(\d+%\)", seen)
    assert f"first_turn {scrape.value('prompts_total', reason='first_turn'):,.0f}" in seen
    assert f"extended {scrape.value('prompts_total', source='extended'):,.0f}" in seen


def test_with_and_without_a_key(tiny_model: TinyModel, capsys: Capture) -> None:
    with FakeVllm(tiny_model) as fake, run_proxy([fake], api_key=["k"], store="memory:") as client:
        headers = {"authorization": "Bearer k", "x-session-id": "mine"}
        client.post(CHAT, json={"messages": [user("Hi")]}, headers=headers)
        assert "pass --api-key KEY" in _top(client, capsys)
        assert re.search(r"(?m)^mine +1 ", _top(client, capsys, "--api-key", "k"))


def test_a_replica_that_is_down(tiny_model: TinyModel, capsys: Capture) -> None:
    with FakeVllm(tiny_model) as fake, run_proxy([fake], store="memory:") as client:
        fake.healthy = False
        wait_until(lambda: client.get("/ready").status_code == 503)
        seen = _top(client, capsys)
        assert re.search(rf"(?m)^{fake.url} +down .*/health", seen)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://127.0.0.1:9/v1/"])
def test_once_without_a_proxy(url: str, capsys: Capture) -> None:
    assert main(["top", "--once", "--url", url]) == 1
    assert "nothing responds at http://127.0.0.1:9:" in capsys.readouterr().out


def test_server_that_is_not_a_tokenproxy(mortal: FakeVllm, capsys: Capture) -> None:
    assert main(["top", "--once", "--url", mortal.url]) == 1
    assert "is not a tokenproxy: GET /ready returned 404" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--url", "proxy:8100"], ["--interval", "0"], ["--interval", "soon"]])
def test_wrong_use(flags: list[str], capsys: Capture) -> None:
    try:
        code: object = main(["top", "--once", *flags])
    except SystemExit as exited:
        code = exited.code
    assert code == 2
    assert "tokenproxy" in capsys.readouterr().err


@contextmanager
def _running(url: str, output: int) -> Iterator[None]:
    command = [sys.executable, "-m", "proxy.cli", "top", "--url", url, "--interval", "0.1"]
    with subprocess.Popen(
        command, stdout=output, env={**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "50"}
    ) as process:
        try:
            yield
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_it_keeps_trying(tiny_model: TinyModel, tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    url, log = f"http://127.0.0.1:{port}", tmp_path / "out"
    with FakeVllm(tiny_model) as fake, log.open("wb") as file, _running(url, file.fileno()):
        fake.canned["/v1/models"] = Canned(b'{"data": []}')  # no model, no tokenizer to load
        wait_until(lambda: f"nothing responds at {url}" in log.read_text())
        command = [sys.executable, "-m", "proxy.cli", "serve", "--upstream", fake.url, "--port", str(port)]
        with subprocess.Popen([*command, "--store", "memory:"], stderr=subprocess.DEVNULL) as process:
            try:
                wait_until(lambda: re.search(rf"(?m)^{fake.url} +ready", log.read_text()))
            finally:
                process.kill()
        wait_until(lambda: "the values below are old; trying again" in log.read_text())
    assert re.search(rf"trying again.*{fake.url} +ready", log.read_text(), re.DOTALL)


def test_in_a_terminal(client: httpx.Client, fake: FakeVllm) -> None:
    ours, its = pty.openpty()
    seen = bytearray()

    def shows(words: str) -> bool:
        if select.select([ours], [], [], 0.05)[0]:
            seen.extend(os.read(ours, 65536))
        return words.encode() in seen

    try:
        with _running(str(client.base_url).rstrip("/"), its):
            wait_until(lambda: shows(fake.url))
            wait_until(lambda: shows("requests/s"))  # the second look has speeds
    finally:
        os.close(its)
        os.close(ours)
    assert b"\x1b[?1049h" in seen  # on a screen of its own


def test_speeds_between_two_looks() -> None:
    now = _snapshot(10.0, {"requests_total": 50.0})
    console = Console(width=160, record=True, file=StringIO())
    console.print(render("u", now, _snapshot(5.0, {"requests_total": 30.0})))
    text = console.export_text()
    assert "requests/s" in text and "4.0" in text


def _snapshot(at: float, values: dict[str, float]) -> Snapshot:
    samples = {name: [Sample(f"tokenproxy_{name}", {}, value)] for name, value in values.items()}
    return Snapshot(at, [], [], "", samples)


def _histogram(at: float, counts: dict[str, float]) -> Snapshot:
    samples = [Sample("tokenproxy_x_bucket", {"le": le}, count) for le, count in counts.items()]
    return Snapshot(at, [], [], "", {"x_bucket": samples})


def test_quantiles() -> None:
    before = _histogram(0, {"0.1": 100.0, "0.2": 100.0, "+Inf": 100.0})
    now = _histogram(1, {"0.1": 100.0, "0.2": 104.0, "+Inf": 108.0})
    assert quantile(now, before, "x", 0.25) == pytest.approx(0.15)
    assert quantile(now, before, "x", 0.5) == pytest.approx(0.2)
    assert quantile(now, before, "x", 0.99) == 0.2  # there is no value beyond the last edge
    assert quantile(now, now, "x", 0.5) is None
    assert quantile(now, None, "none", 0.5) is None
    assert quantile(now, None, "x", 0.5) == pytest.approx(0.054)
