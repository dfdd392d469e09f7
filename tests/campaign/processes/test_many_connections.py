"""1500 slow connections at once, while other clients are served."""

import re
import resource
import socket
import subprocess
import sys
import threading
import time

import httpx

from tests.support.fake_vllm import Canned, FakeVllm
from tests.support.sockets import CHAT, HALF_HEAD, PATIENCE_S, connect, head


class _Loris(threading.Thread):
    """Many connections that send half a request, and then a byte a second each."""

    def __init__(self, url: httpx.URL, count: int) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._count = count
        self.closed: list[float] = []
        """How long each that the server closed was open, in seconds."""
        self.opened = threading.Event()

    def run(self) -> None:
        starts = (HALF_HEAD, head(CHAT, "content-length: 100000") + b"{")
        open_now: dict[socket.socket, float] = {}
        for index in range(self._count):
            connection = connect(self._url)
            connection.sendall(starts[index % 2])
            connection.setblocking(False)
            open_now[connection] = time.monotonic()
        self.opened.set()
        deadline = time.monotonic() + 60
        while open_now and time.monotonic() < deadline:
            for connection, start in list(open_now.items()):
                if _is_closed(connection):
                    self.closed.append(time.monotonic() - start)
                    connection.close()
                    del open_now[connection]
            time.sleep(1)
        for connection in open_now:
            connection.close()


def _is_closed(connection: socket.socket) -> bool:
    """Read what came, and send one more byte."""
    try:
        while part := connection.recv(4096):
            pass
        return not part
    except BlockingIOError:
        pass
    except OSError:
        return True
    try:
        connection.send(b" ")
    except OSError:
        return True
    return False


def test_1500_slow_connections_are_closed_while_others_are_served(mortal: FakeVllm) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    mortal.canned["/v1/embeddings"] = Canned(b"[1]")
    command = [sys.executable, "-m", "proxy.cli", "serve", "--upstream", mortal.url, "--port", "0"]
    command += ["--store", "memory:"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            found = next(
                match for line in process.stderr if (match := re.search(r"running on (http\S+)", line))
            )
            threading.Thread(target=process.stderr.read, daemon=True).start()
            url = httpx.URL(found[1])
            with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE_S) as client:
                assert client.post("/v1/embeddings").text == "[1]"
                loris = _Loris(url, 1500)
                loris.start()
                slowest = served = 0.0
                while loris.is_alive():
                    start = time.monotonic()
                    assert client.post("/v1/embeddings").text == "[1]"
                    slowest, served = max(slowest, time.monotonic() - start), served + 1
                    time.sleep(0.05)
            assert len(loris.closed) == 1500
            assert max(loris.closed) < 60, "seconds until the last one was closed"
            assert served > 20 and slowest < 5
        finally:
            process.kill()
