"""A real vLLM on CPU, as a process that can be started, waited for and ended without a trace."""

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

from proxy.demo.children import child_environment, end_group
from proxy.demo.errors import EngineStartError
from proxy.demo.progress import Heartbeat, Say, say_stderr, shorten

MODEL_NAME = "smollm2"

STANDARD_FLAGS = (
    *("--served-model-name", MODEL_NAME),
    *("--dtype", "bfloat16"),
    "--enforce-eager",
    *("--max-model-len", "4096"),
    "--enable-auto-tool-choice",
    *("--tool-call-parser", "hermes"),
    "--enable-prompt-tokens-details",
    *("--gpu-memory-utilization", "0.3"),
)

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # One thread is enough for so small a model, and more of them wait for each other: on 2 cores 57 tokens/s
    # with one, 13 with two. Not bound to a core, because vLLM binds to the same one in every server: two
    # servers that start together are ready after 40 s, and after 75 s when bound.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

_LOG_TAIL_BYTES = 16_384
_LOG_PREFIX = re.compile(r"^(\(\S+ pid=\d+\) )?((DEBUG|INFO|WARNING|ERROR) \S+ \S+ \[\S+\] )?(?P<text>.*)$")


class EngineProcess:
    """One vLLM server and all processes it spawns, between `start` and `stop`.

    As a context manager it starts on entry and stops on exit; entering does not wait until it is ready:

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
    ) -> None:
        """Describe a server; nothing runs yet.

        Args:
            model: folder of the checkpoint.
            host: address to listen on.
            port: 0 picks a free one.
            api_server_count: vLLM's API server processes, all behind the one port.
            plugin: True runs `tokenproxy vllm`, False a stock vLLM with no plugin of any kind.
            extra_flags: of `vllm serve`; they come last and so win over `STANDARD_FLAGS`.
            extra_environment: variables that win over this process's and the standard ones.
            log_file: where output goes, and stays; None is a temporary file that `stop` removes.
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
        """Where it listens, without a path: `http://127.0.0.1:8000`."""
        return f"http://{self._local_host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Id of the process, and of the process group, that `start` made; None when not started."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the processes and return at once.

        Raises:
            EngineStartError: something listens on the port.
            RuntimeError: it is already started.
        """
        if self._process is not None:
            raise RuntimeError("this engine is already started")
        # vLLM with several API servers shares its port with whoever allows it, and `wait_ready` would then
        # find the other server healthy.
        if self._port and _is_listening(self._local_host, self._port):
            raise EngineStartError(f"something listens on {self.url} already; choose another port")
        self._port = self._port or free_port(self._host)
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
                # A session of its own: one group to end, and Ctrl-C in the terminal is the demo's alone.
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float = 300.0, say: Say = say_stderr) -> None:
        """Block until `/health` answers 200, saying every 2 s how long it took and what vLLM does.

        Raises:
            EngineStartError: the process ended, or `timeout_s` seconds passed; with the end of its log.
        """
        deadline = time.monotonic() + timeout_s
        with Heartbeat(say, "starting vLLM", self.last_log_line):
            while not self._is_healthy():
                self.check_alive()
                if time.monotonic() >= deadline:
                    raise EngineStartError(f"vLLM was not ready after {timeout_s:.0f} s{self._ending()}")
                time.sleep(0.2)

    def check_alive(self) -> None:
        """Raise EngineStartError, with the end of the log, unless the server's first process runs."""
        code = self._process.poll() if self._process else None
        if self._process is None or code is not None:
            raise EngineStartError(f"vLLM ended with code {code}{self._ending()}")

    def stop(self, grace_s: float = 15.0, say: Say = say_stderr) -> None:
        """End every process that was started; it does nothing when none runs.

        SIGTERM first, SIGKILL for those still there after `grace_s` seconds.

        Raises:
            RuntimeError: a process outlived SIGKILL.
        """
        if self._process is None:
            return
        process, self._process = self._process, None
        with Heartbeat(say, "stopping vLLM"):
            left = end_group(process.pid, grace_s)
        process.poll()
        if self._log_file is not None and not self._keeps_log:
            self._log_file.unlink(missing_ok=True)
            self._log_file = None
        if left:
            raise RuntimeError(f"these processes of vLLM could not be ended: {left}")

    def log_tail(self, lines: int = 20) -> str:
        """The last `lines` lines of the log."""
        return "\n".join(self._log_lines()[-lines:])

    def last_log_line(self, limit: int = 70) -> str:
        """The last line of the log that says something, without its prefix, at most `limit` characters."""
        for line in reversed(self._log_lines()):
            found = _LOG_PREFIX.match(line)
            text = found["text"].strip() if found else ""
            # vLLM's banner is drawn with block characters.
            if re.search(r"[A-Za-z]{3}", text):
                return shorten(text, limit)
        return ""

    @property
    def _local_host(self) -> str:
        """An address of this machine that reaches `host`."""
        return "127.0.0.1" if self._host in ("", "0.0.0.0") else self._host

    def _command(self) -> list[str]:
        module = ["proxy.cli", "vllm"] if self._plugin else ["proxy.demo.stock_vllm"]
        return [
            *(sys.executable, "-m", *module, str(self._model)),
            *("--host", self._host, "--port", str(self._port)),
            *("--api-server-count", str(self._api_server_count)),
            *STANDARD_FLAGS,
            *self._extra_flags,
        ]

    def _environment(self) -> dict[str, str]:
        # An empty VLLM_PLUGINS keeps out every plugin that happens to be installed here.
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

    def _ending(self) -> str:
        where = f" ({self._log_file})" if self._keeps_log else ""
        return f"; its log{where} ends with:\n{self.log_tail()}"

    def _log_lines(self) -> list[str]:
        if self._log_file is None or not self._log_file.exists():
            return []
        with self._log_file.open("rb") as log:
            log.seek(max(0, self._log_file.stat().st_size - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()


def free_port(host: str) -> int:
    """A TCP port of `host` that nothing listens on; another process may take it before its use."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _is_listening(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True
