"""EngineProcess with a small program in place of vLLM: real processes and a real port."""

import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import held_port
from tokenproxy.app.children import group_members
from tokenproxy.demo import EngineStartError
from tokenproxy.demo.stack import EngineProcess

_STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True:
    signal.pause()
"""

# A parent and a child in one process group, like an API server and its engine; the child ignores SIGTERM.
_SERVER = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    log_message = lambda *arguments: None

child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdout=subprocess.PIPE)
child.stdout.readline()
print("(APIServer pid=7) INFO 11-21 03:26:35 [core.py:133] Ready to serve", flush=True)
print("\\u2588\\u2580", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class _FakeEngineProcess(EngineProcess):
    """Runs `code` in place of vLLM, with the port and `_STUBBORN` as its arguments."""

    def __init__(self, code: str, **options: Any) -> None:
        super().__init__(Path("model"), **options)
        self._code = code

    def _command(self) -> list[str]:

        return [sys.executable, "-c", self._code, self.url.rsplit(":", 1)[1], _STUBBORN]


def test_stop_ends_all_processes_of_the_group() -> None:
    with held_port() as port, ExitStack() as stack:
        engine = _FakeEngineProcess(_SERVER, port=port)
        engine.stop()  # does nothing before the start
        stack.enter_context(engine)
        engine.wait_ready()
        group = engine.pid
        assert group is not None
        assert urllib.request.urlopen(f"{engine.url}/health").status == 200
        assert engine.last_log_line() == "Ready to serve"
        assert len(group_members(group)) == 2
        with pytest.raises(RuntimeError, match="already"):
            engine.start()
        engine.stop(grace_s=0.1)
        assert group_members(group) == []
    assert engine.pid is None


def test_a_server_that_ends_or_never_listens(tmp_path: Path) -> None:
    """The error has the end of its log, which is kept in the given file."""
    log = tmp_path / "logs" / "vllm.log"
    with (
        _FakeEngineProcess("import sys; sys.exit('unknown flag --nonsense')", log_file=log) as engine,
        pytest.raises(EngineStartError, match=r"code 1(.|\n)*unknown flag --nonsense"),
    ):
        engine.wait_ready()
    assert log.read_text() == "unknown flag --nonsense\n"
    with (
        _FakeEngineProcess("import signal; signal.pause()") as engine,
        pytest.raises(EngineStartError, match="not ready after 0 s"),
    ):
        engine.wait_ready(timeout_s=0)
