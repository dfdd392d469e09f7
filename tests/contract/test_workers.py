"""`tokenproxy serve --workers N`: several processes on one port."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import aiohttp
import httpx
import pytest
from prometheus_client.multiprocess import MultiProcessCollector

from proxy.cli import main
from proxy.server import run
from proxy.settings import Settings
from proxy.workers.supervisor import LONGEST_PAUSE_S, restart_pause
from tests.support.crowd import Crowd, check_record
from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.scraping import Scrape
from tests.support.serve_process import ServeProcess, metrics_folder
from tests.support.talk import CHAT, user
from tests.support.tiny_model import END, HI, TinyModel
from tests.support.utils import wait_until

_ENGINE = "http://127.0.0.1:1"
_SHARED_PAGE = """
import os, sys
from pathlib import Path
from proxy.metrics import ReplicaState
from proxy.workers.metrics import add_process, shared_metrics
folder = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
add_process(folder, sys.argv[1], os.getpid())
metrics = shared_metrics(int(sys.argv[1]), folder)
metrics.of_route("/x").count(200)
metrics.in_flight.inc()
for replica in ("http://stays", "http://leaves"):
    metrics.replica_state(replica, ReplicaState.READY)
metrics.replica_removed("http://leaves")
sys.stdout.buffer.write(metrics.page())
"""


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/rollouts.db"


def _served(folder: Path, worker: int) -> float:
    """The chat requests that a worker has served."""
    metrics = MultiProcessCollector.merge([str(folder / f"counter_{worker}.db")])
    samples = [sample for metric in metrics for sample in metric.samples]
    counted: float = sum(
        sample.value
        for sample in samples
        if sample.name == "tokenproxy_requests_total" and sample.labels["route"] == CHAT
    )
    return counted


@pytest.mark.slow
def test_conversations_stay_exact_and_on_their_replica(
    mortal: FakeVllm, tiny_model: TinyModel, tmp_path: Path, store: str
) -> None:
    """Each request has a new connection, which any worker accepts."""
    flags = ("--store", store, "--workers", "2", "--overload-ratio", "1000")
    with (
        FakeVllm(tiny_model) as second,
        ServeProcess([mortal.url, second.url], tmp_path / "log", *flags) as proxy,
        httpx.Client(base_url=proxy.url, trust_env=False, timeout=60) as client,
    ):
        proxy.wait_workers_ready(2)
        crowd = Crowd(proxy.url, 20)
        assert crowd.ask().reasons == {"first_turn"}
        for _ in range(4):
            wave = crowd.ask()
            assert (wave.reasons, {answer.source for answer in wave.answers}) == ({""}, {"extended"})
        check_record(client, crowd.answers)
        held = [_sessions(engine) for engine in (mortal, second)]
        assert all(held) and not held[0] & held[1]
        assert held[0] | held[1] == {answer.session for answer in crowd.answers}
        folder = metrics_folder(proxy.workers[0])
        served = [_served(folder, worker) for worker in (1, 2)]
        assert min(served) > 0 and sum(served) == 100
        assert Scrape(client).value("requests_total", route=CHAT, status="200") == 100
    assert "Traceback" not in proxy.text


def _sessions(engine: FakeVllm) -> set[str]:
    """The sessions whose turns an engine sampled."""
    named = {seen.header("x-session-id") for seen in engine.requests if seen.path == CHAT}
    return {name.decode() for name in named if name}


class _Load:
    """Clients that send requests over new connections, one after the other."""

    def __init__(self, url: str, clients: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._url = url
        self._served = asyncio.Semaphore(0)
        self._tasks = [asyncio.create_task(self._send()) for _ in range(clients)]

    async def stop(self) -> None:
        """Wait for the last responses."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def until(self, count: int) -> None:
        """Wait for so many more requests that are served."""
        self._served = asyncio.Semaphore(0)
        async with asyncio.timeout(60):
            for _ in range(count):
                await self._served.acquire()

    async def _send(self) -> None:
        body = {"messages": [user("Hi")]}
        while True:
            try:
                async with aiohttp.ClientSession(self._url) as http, http.post(CHAT, json=body) as response:
                    await response.read()
                    self.outcomes[str(response.status)] += 1
                    if response.status == 200:
                        self._served.release()
            except aiohttp.ClientError:
                self.outcomes["lost"] += 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_worker_that_ends_is_replaced(
    mortal: FakeVllm, tmp_path: Path, store: str, number: signal.Signals
) -> None:
    """Only requests of a worker that is killed are lost; no counter falls."""
    clients = 8
    mortal.replies.extend([Reply(ids=(*HI, END), pause_s=0.01)] * 100_000)
    with ServeProcess([mortal.url], tmp_path / "log", "--store", store, "--workers", "2") as proxy:
        await asyncio.to_thread(proxy.wait_workers_ready, 2)
        before = proxy.workers
        load = _Load(proxy.url, clients)
        await load.until(50)
        served = await _scrape(proxy.url)
        os.kill(before[0], number)
        await asyncio.to_thread(wait_until, lambda: not {before[0]} & set(proxy.workers))
        await load.until(20)
        assert (await _scrape(proxy.url)).value("requests_total", route=CHAT) >= served.value(
            "requests_total", route=CHAT
        )
        await asyncio.to_thread(proxy.wait_workers_ready, 3)
        assert before[1] in proxy.workers and len(proxy.workers) == 2
        await load.until(50)
        await load.stop()
        assert set(load.outcomes) <= {"200", "lost"}
        assert load.outcomes["lost"] <= clients
        scrape = await _scrape(proxy.url)
        counted = scrape.value("requests_total", route=CHAT, status="200")
        assert load.outcomes["200"] - clients <= counted <= load.outcomes["200"] + 2 * clients
        await asyncio.to_thread(_wait_nothing_in_flight, proxy.url)
        proxy.signal()
        assert await asyncio.to_thread(proxy.wait) == 0
    how = "was ended by SIGKILL" if number == signal.SIGKILL else "ended with exit code 0"
    assert f"worker 1 (process {before[0]}) {how}; it starts again in 0 s" in proxy.text


async def _scrape(url: str) -> Scrape:
    def scrape() -> Scrape:
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
            return Scrape(client)

    return await asyncio.to_thread(scrape)


def _wait_nothing_in_flight(url: str) -> None:
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        wait_until(lambda: Scrape(client).value("requests_in_flight") == 0)


def test_memory_store_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    serve = ["serve", "--upstream", _ENGINE, "--port", "0", "--store", "memory:"]
    assert main([*serve, "--workers", "2"]) == 2
    error = capsys.readouterr().err
    assert "`store: memory:`" in error and "--workers 1" in error


def test_taken_port_is_one_error(store: str, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(Settings(upstreams=[_ENGINE], port=port, workers=2, store=store)) == 1
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert str(port) in record.getMessage() and "in use" in record.getMessage()


@pytest.mark.slow
def test_worker_that_does_not_start_ends_the_start(
    tmp_path: Path, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = tmp_path / "cert.pem"
    wrong.write_text("no certificate")
    settings = Settings(upstreams=[_ENGINE], port=0, workers=2, store=store, tls_cert=wrong, tls_key=wrong)
    start = time.monotonic()
    assert run(settings) == 1
    assert time.monotonic() - start < 20
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    message = record.getMessage()
    assert message.startswith("the proxy did not start: its first worker (process ")
    assert message.endswith(" ended with exit code 1")


def test_pauses_grow_up_to_a_limit() -> None:
    assert [restart_pause(soon) for soon in range(1, 6)] == [0, 1, 2, 4, 8]
    assert restart_pause(100) == LONGEST_PAUSE_S


def test_page_adds_up_workers_and_the_workers_before_them(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    pages = [
        subprocess.run(
            [sys.executable, "-c", _SHARED_PAGE, str(worker)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        for worker in (1, 2, 1)
    ]
    page = pages[-1].stdout
    assert 'tokenproxy_requests_total{route="/x",status="200"} 3.0' in page
    assert 'tokenproxy_replica_state{replica="http://stays",state="ready"} 1.0' in page
    assert "http://leaves" not in page
    assert page.count("process_resident_memory_bytes ") == 3  # HELP, TYPE, and one value
    assert not any(done.stderr for done in pages)
    assert len(list(tmp_path.glob("counter_*.db"))) == 2
