"""A proxy that starts before its store works: it serves, and records from the moment on that it does."""

import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.crowd import Crowd, check_record, run_proxy_process, store_state
from tests.support.fake_vllm import FakeVllm
from tests.support.redis_server import RedisServer
from tests.support.utils import wait_until


def test_a_server_that_starts_after_the_proxy(mortal: FakeVllm, tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    log = tmp_path / "proxy.log"
    with run_proxy_process(mortal, f"redis://127.0.0.1:{server.port}/0", log) as client:
        state = store_state(client)
        assert state["state"] == "unavailable" and "is the server running" in state["error"]
        assert client.get("/ready").status_code == 200
        crowd = Crowd(str(client.base_url), 5)
        assert crowd.ask().reasons == {"first_turn"} and crowd.ask().reasons == {"store_unavailable"}
        server.start()
        try:
            wait_until(lambda: store_state(client)["state"] == "ok")
            assert crowd.ask().reasons == {""}
            check_record(client, crowd.answers)
        finally:
            server.kill()
    assert "the store does not work" in log.read_text() and "works again" in log.read_text()


def test_a_file_that_is_locked_while_the_proxy_starts(mortal: FakeVllm, tmp_path: Path) -> None:
    file = tmp_path / "rollouts.db"
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with run_proxy_process(mortal, f"sqlite://{file}", tmp_path / "proxy.log") as client:
            assert store_state(client)["state"] == "stalled"
            crowd = Crowd(str(client.base_url), 5)
            crowd.ask()
            crowd.ask()
            other.execute("ROLLBACK")
            wait_until(lambda: store_state(client)["state"] == "ok")
            assert crowd.ask().reasons == {""}
            check_record(client, crowd.answers)


def test_a_folder_that_cannot_be_written_at_first(mortal: FakeVllm, tmp_path: Path) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        with run_proxy_process(mortal, f"sqlite://{folder}/x/rollouts.db", tmp_path / "proxy.log") as client:
            assert "Read-only" in store_state(client)["error"]
            crowd = Crowd(str(client.base_url), 2)
            crowd.ask()
            subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
            wait_until(lambda: store_state(client)["state"] == "ok")
            assert crowd.ask().reasons == {""}
            check_record(client, crowd.answers)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
