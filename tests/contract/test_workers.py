"""`tokenproxy serve --workers N`: several processes on one port."""

import socket
from pathlib import Path

import httpx
import pytest

from tests.support.crowd import Crowd, check_record
from tests.support.fake_vllm import FakeVllm
from tests.support.scraping import Scrape
from tests.support.serve_process import ServeProcess
from tests.support.talk import CHAT
from tests.support.utils import wait_until
from tokenproxy.app.server import run
from tokenproxy.app.workers import LONGEST_PAUSE_S, restart_pause
from tokenproxy.cli.main import main
from tokenproxy.settings import Settings

_ENGINE = "http://127.0.0.1:1"
pytestmark = pytest.mark.timeout(60)
"""Three processes import the whole program before a request is answered."""


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/rollouts.db"


def test_conversations_stay_exact_whichever_worker_accepts(
    mortal: FakeVllm, tmp_path: Path, store: str
) -> None:
    """Each request has a new connection, which any worker accepts."""
    flags = ("--store", store, "--store-timeout-s", "15", "--workers", "2")
    with (
        ServeProcess([mortal.url], tmp_path / "log", *flags) as proxy,
        httpx.Client(base_url=proxy.url, trust_env=False, timeout=60) as client,
    ):
        proxy.wait_workers_ready(2)
        crowd = Crowd(proxy.url, 20)
        assert crowd.ask().reasons == {"first_turn"}
        wave = crowd.ask()
        assert (wave.reasons, {answer.source for answer in wave.answers}) == ({""}, {"extended"})
        # each is counted after its answer was sent
        wait_until(lambda: Scrape(client).value("requests_total", route=CHAT, status="200") >= 40)
        assert Scrape(client).value("requests_total", route=CHAT) == 40
        check_record(client, crowd.answers)
    assert "Traceback" not in proxy.text


def test_memory_store_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    serve = ["serve", "--upstream", _ENGINE, "--port", "0", "--store", "memory:"]
    assert main([*serve, "--workers", "2"]) == 2
    error = capsys.readouterr().err
    assert "`store: memory:`" in error and "--workers 1" in error


@pytest.mark.parametrize("workers", [1, 2])
def test_taken_port_is_one_error(store: str, caplog: pytest.LogCaptureFixture, workers: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(Settings(upstreams=[_ENGINE], port=port, workers=workers, store=store)) == 1
    [record] = [each for each in caplog.records if (each.name, each.levelname) == ("tokenproxy", "ERROR")]
    assert str(port) in record.getMessage() and "in use: pass another --port" in record.getMessage()


def test_worker_that_does_not_start_ends_the_start(
    tmp_path: Path, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = tmp_path / "cert.pem"
    wrong.write_text("no certificate")
    settings = Settings(upstreams=[_ENGINE], port=0, workers=2, store=store, tls_cert=wrong, tls_key=wrong)
    assert run(settings) == 1
    [record] = [each for each in caplog.records if (each.name, each.levelname) == ("tokenproxy", "ERROR")]
    assert "did not start: its first worker (process " in record.getMessage()


def test_pauses_grow_up_to_a_limit() -> None:
    assert [restart_pause(soon) for soon in range(1, 6)] == [0, 1, 2, 4, 8]
    assert restart_pause(100) == LONGEST_PAUSE_S
