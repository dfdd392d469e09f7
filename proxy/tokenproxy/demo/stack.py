"""Run a vLLM server on CPU: start it, wait until it is ready, and end all its processes."""

import http.client
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tokenproxy.app.children import child_environment, end_group, free_port
from tokenproxy.demo import EngineStartError
from tokenproxy.demo.progress import heartbeat

MODEL_NAME = "smollm2"

STANDARD_FLAGS = (
    *("--served-model-name", MODEL_NAME),
    # Not every CPU computes in bfloat16: without AVX-512 it takes four times as long as float32. In bfloat16
    # the logprobs of a prompt also differ by up to 0.2 with the other requests of its batch.
    *("--dtype", "float32"),
    "--enforce-eager",
    *("--max-model-len", "8192"),
    "--enable-auto-tool-choice",
    *("--tool-call-parser", "hermes"),
    "--enable-prompt-tokens-details",
    *("--gpu-memory-utilization", "0.3"),
)

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, for 23,000 ids
    # One process schedules and computes. Of two, one would keep a core busy while it waits for the other.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # With so small a model, threads mostly wait for each other: on 2 cores of which another program keeps one
    # busy, one thread gives 19 tokens/s, two give 4. They are not bound to a core, because every server would
    # bind to the same one: two servers that start together are ready after 40 s, and after 75 s if bound.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

_LOG_TAIL_BYTES = 16_384
_LOG_PREFIX = re.compile(r"^(\(\S+ pid=\d+\) )?((DEBUG|INFO|WARNING|ERROR) \S+ \S+ \[\S+\] )?(?P<text>.*)$")


class EngineProcess:
    """One vLLM server with all processes that it spawns, from `start` to `stop`.

    As a context manager it starts on entry and stops on exit. Entry does not wait until it is ready:

        with EngineProcess(ensure_checkpoint(), plugin=False) as engine:
            engine.wait_ready()
            OpenAI(base_url=f"{engine.url}/v1", api_key="none")
    """

    def __init__(
        self,
        model: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_server_count: int = 1,
        plugin: bool = True,
        extra_flags: Sequence[str] = (),
        extra_environment: Mapping[str, str] | None = None,
        log_file: Path | None = None,
        python: str = sys.executable,
    ) -> None:
        """Configure a server without starting it.

        Args:
            model: folder of the checkpoint.
            host: address to listen on.
            port: port to listen on; 0 picks a free one.
            api_server_count: number of vLLM's API server processes, which share the port.
            plugin: True runs `tokenproxy vllm`, False a stock vLLM without any plugin.
            extra_flags: flags of `vllm serve`; they override `STANDARD_FLAGS`.
            extra_environment: variables that override this process's and the standard ones.
            log_file: file for the output; None writes to a temporary file that `stop` removes.
            python: interpreter that has vLLM and this package.
        """
        self._model = model
        self._host = host
        self._port = port
        self._api_server_count = api_server_count
        self._plugin = plugin
        self._extra_flags = tuple(extra_flags)
        self._extra_environment = dict(extra_environment or {})
        self._log_file = log_file
        self._keeps_log = log_file is not None
        self._python = python
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The server's URL without a path: `http://127.0.0.1:8000`."""
        return f"http://{self._local_host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Id of the server's first process, and of its process group; None if it does not run."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the processes and return at once.

        Raises:
            EngineStartError: another process listens on the port, or the host has no free one.
            RuntimeError: the server is already started.
        """
        if self._process is not None:
            raise RuntimeError("the server is already started: stop it first")
        # vLLM with several API servers lets other processes share its port, and `wait_ready` would then
        # find the other server healthy.
        if self._port and _is_listening(self._local_host, self._port):
            raise EngineStartError(f"another process listens on {self.url}: choose another port")
        try:
            self._port = self._port or free_port(self._host)
        except OSError as error:
            raise EngineStartError(str(error)) from error
        if self._log_file is None:
            descriptor, name = tempfile.mkstemp(prefix="tokenproxy-vllm-", suffix=".log")
            os.close(descriptor)
            self._log_file = Path(name)
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A new session is one process group to end, and keeps Ctrl-C in the terminal from the server.
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Block until `/health` returns 200; report the elapsed time and vLLM's last log line every 2 s.

        Raises:
            EngineStartError: the server ended, or is not ready after `timeout_s` seconds; has the log's end.
        """
        deadline = time.monotonic() + timeout_s
        with heartbeat("starting vLLM", self.last_log_line):
            while not self._is_healthy():
                self.check_alive()
                if time.monotonic() >= deadline:
                    raise EngineStartError(f"vLLM was not ready after {timeout_s:.0f} s{self._log_suffix()}")
                time.sleep(0.2)

    def check_alive(self) -> None:
        """Check that the server's first process runs.

        Raises:
            EngineStartError: it ended, or was not started; the message has the end of its log.
        """
        code = self._process.poll() if self._process else None
        if self._process is None or code is not None:
            raise EngineStartError(f"vLLM ended with code {code}{self._log_suffix()}")

    def stop(self, grace_s: float = 15.0) -> None:
        """End all processes of the server; does nothing if it does not run.

        It sends SIGTERM, and after `grace_s` seconds SIGKILL to the processes that still run.

        Raises:
            RuntimeError: a process survived SIGKILL.
        """
        if self._process is None:
            return
        process, self._process = self._process, None
        with heartbeat("stopping vLLM"):
            surviving = end_group(process.pid, grace_s)
        process.poll()
        if self._log_file is not None and not self._keeps_log:
            self._log_file.unlink(missing_ok=True)
            self._log_file = None
        if surviving:
            raise RuntimeError(f"processes of vLLM survived SIGKILL: {surviving}")

    def last_log_line(self) -> str:
        """The last line of the log that has words, without its prefix, cut to 70 characters."""
        for line in reversed(self._log_lines()):
            match = _LOG_PREFIX.match(line)
            text = match["text"].strip() if match else ""
            # Lines without words are vLLM's banner, drawn with block characters.
            if re.search(r"[A-Za-z]{3}", text):
                return text if len(text) <= 70 else f"{text[:69]}…"
        return ""

    @property
    def _local_host(self) -> str:
        """The address to connect to: `host`, or the loopback address if that means all addresses."""
        return "127.0.0.1" if self._host in ("", "0.0.0.0") else self._host

    def _command(self) -> list[str]:
        module = ["tokenproxy", "vllm"] if self._plugin else ["tokenproxy.app.vllm_launcher"]
        return [
            *(self._python, "-m", *module, str(self._model)),
            *("--host", self._host, "--port", str(self._port)),
            *("--api-server-count", str(self._api_server_count)),
            *STANDARD_FLAGS,
            *self._extra_flags,
        ]

    def _environment(self) -> dict[str, str]:
        # An empty VLLM_PLUGINS disables every installed plugin.
        plugins = {} if self._plugin else {"VLLM_PLUGINS": ""}
        return child_environment() | _ENVIRONMENT | plugins | self._extra_environment

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(self._local_host, self._port, timeout=2.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _log_suffix(self) -> str:
        log_path = f" ({self._log_file})" if self._keeps_log else ""
        tail = "\n".join(self._log_lines()[-20:])
        return f"; its log{log_path} ends with:\n{tail}"

    def _log_lines(self) -> list[str]:
        if self._log_file is None or not self._log_file.exists():
            return []
        with self._log_file.open("rb") as log:
            log.seek(max(0, self._log_file.stat().st_size - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()


def _is_listening(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True
