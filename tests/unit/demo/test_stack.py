"""EngineProcess with a small program in place of vLLM: real processes and a real port."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from proxy.demo import children
from proxy.demo.children import end_group, group_members
from proxy.demo.errors import EngineStartError
from proxy.demo.stack import STANDARD_FLAGS, EngineProcess
from tests.support.quiet import quiet

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""

# A parent and a child in one process group, like an API server and its engine; the child ignores SIGTERM.
SERVER = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *arguments):
        pass

child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdout=subprocess.PIPE)
child.stdout.readline()
print("(APIServer pid=7) INFO 11-21 03:26:35 [core.py:133] Ready to serve", flush=True)
print("\\u2588\\u2580", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class FakeEngineProcess(EngineProcess):
    """Runs `code` in place of vLLM, with the port and `STUBBORN` as its arguments."""

    def __init__(self, code, **options):
        super().__init__(Path("model"), **options)
        self._code = code

    def _command(self):
        return [sys.executable, "-c", self._code, self.url.rsplit(":", 1)[1], STUBBORN]


def test_stop_ends_all_processes_of_the_group():
    engine = FakeEngineProcess(SERVER)
    with engine:
        engine.wait_ready(timeout_s=30, progress=quiet)
        group = engine.pid
        assert group is not None
        assert urllib.request.urlopen(f"{engine.url}/health").status == 200
        assert engine.last_log_line() == "Ready to serve"
        assert len(group_members(group)) == 2
        engine.stop(grace_s=0.2)
        assert group_members(group) == []
    assert engine.pid is None


def test_error_of_a_server_that_ended_has_its_log():
    with (
        FakeEngineProcess("import sys; sys.exit('unknown flag --nonsense')") as engine,
        pytest.raises(EngineStartError, match=r"code 1(.|\n)*unknown flag --nonsense"),
    ):
        engine.wait_ready(timeout_s=30, progress=quiet)


def test_server_that_never_listens_times_out():
    with (
        FakeEngineProcess("import time; time.sleep(600)") as engine,
        pytest.raises(EngineStartError, match="not ready after 1 s"),
    ):
        engine.wait_ready(timeout_s=1, progress=quiet)


def test_given_log_file_is_kept(tmp_path):
    log = tmp_path / "logs" / "vllm.log"
    with FakeEngineProcess("print('hello')", log_file=log) as engine, pytest.raises(EngineStartError):
        engine.wait_ready(timeout_s=30, progress=quiet)
    assert log.read_text() == "hello\n"


def test_starting_twice_is_refused():
    with (
        FakeEngineProcess("import time; time.sleep(600)") as engine,
        pytest.raises(RuntimeError, match="already"),
    ):
        engine.start()


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        engine = FakeEngineProcess("", port=taken.getsockname()[1])
        with pytest.raises(EngineStartError, match="choose another port"):
            engine.start()


def test_stop_without_start_does_nothing():
    FakeEngineProcess("").stop()


@pytest.mark.parametrize(
    ("plugin", "module"), [(True, ["proxy.cli", "vllm"]), (False, ["proxy.demo.stock_vllm"])]
)
def test_command_and_environment(monkeypatch, plugin, module):
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    engine = EngineProcess(
        Path("model"),
        port=1234,
        plugin=plugin,
        api_server_count=2,
        extra_flags=["--max-model-len", "512"],
        extra_environment={"OMP_NUM_THREADS": "7"},
    )
    command, environment = engine._command(), engine._environment()
    assert command[:2] == [sys.executable, "-m"]
    assert command[2 : 3 + len(module)] == [*module, "model"]
    assert command[-2:] == ["--max-model-len", "512"]
    assert set(STANDARD_FLAGS) < set(command)
    assert environment["VLLM_PLUGINS"] == ("another" if plugin else "")
    assert environment["OMP_NUM_THREADS"] == "7"
    assert Path(environment["PYTHONPATH"].split(os.pathsep)[0], "proxy", "demo").is_dir()


def test_interrupted_stop_sends_sigkill_at_once(monkeypatch):
    command = [sys.executable, "-c", STUBBORN]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()

    def raise_interrupt(_group):
        raise KeyboardInterrupt

    monkeypatch.setattr(children, "group_members", raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        end_group(process.pid, grace_s=60)
    assert process.wait(timeout=10) == -signal.SIGKILL


def test_a_host_that_is_not_of_this_machine_is_refused() -> None:
    with pytest.raises(EngineStartError, match=r"192\.0\.2\.254.*no free port"):
        FakeEngineProcess("", host="192.0.2.254").start()
