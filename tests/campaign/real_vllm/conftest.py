"""Real engines for the tests in this folder, each started once in a session and all at the same time.

The same test bodies run against the routes inside vLLM (two API server processes) and against the proxy in
front of a stock vLLM; some also against the proxy made to use vLLM's generate route.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from proxy.client.calls import LIMITS
from proxy.demo.checkpoint import ensure_checkpoint
from proxy.demo.stack import EngineProcess
from proxy.ports import free_port
from tests.campaign.real_vllm.shared_engines import share_engines, shared_log

INSIDE, FRONT, GENERATE = "inside vLLM", "in front of vLLM", "in front, by the generate route"
START_TIMEOUT_S = 600.0
STORE_TIMEOUT_S = "30"
"""Engines share the cores with each other here: a database may be slow without being stuck."""


@dataclass(frozen=True)
class Served:
    """A server with the token routes, and the engine that does its work."""

    url: str
    engine: EngineProcess
    recorder: Mapping[str, str] = field(default_factory=dict)
    """Variables of the recording process that the test's own does not have: they tell where its store is."""

    def client(self) -> OpenAI:
        """An unmodified SDK client."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def http(self) -> httpx.Client:
        """A plain HTTP client for any number of threads."""
        return httpx.Client(base_url=self.url, timeout=120, limits=LIMITS)

    def running(self) -> float:
        """How many requests the engine works on, by its own metric."""
        lines = httpx.get(f"{self.engine.url}/metrics", timeout=30).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything here, and run what kills engines last."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.real_vllm)
    items.sort(key=lambda item: item.get_closest_marker("kills_engine") is not None)


@pytest.fixture(scope="session")
def model() -> Path:
    """The embedded model's checkpoint."""
    return ensure_checkpoint()


@pytest.fixture(scope="session")
def thinking_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with two of its unused special tokens made ordinary ones: the marks of reasoning."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    marks = {"<jupyter_start>": "<think>", "<jupyter_text>": "</think>"}
    for token in tokenizer["added_tokens"]:
        if token["content"] in marks:
            # special ones are not shown to the parser of whole answers
            token |= {"content": marks[token["content"]], "special": False}
    for unused, mark in marks.items():
        tokenizer["model"]["vocab"][mark] = tokenizer["model"]["vocab"].pop(unused)
    return checkpoint_with(model, tmp_path_factory.mktemp("thinking"), "tokenizer.json", tokenizer)


def checkpoint_with(model: Path, folder: Path, name: str, content: dict[str, Any]) -> Path:
    """A checkpoint in `folder` with the files of another, of which one JSON file has other content."""
    for file in model.iterdir():
        if file.name != name:
            (folder / file.name).symlink_to(file)
    (folder / name).write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="session")
def engines(
    request: pytest.FixtureRequest,
    model: Path,
    thinking_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, EngineProcess]]:
    """All engines that the selected tests need, started at the same time; processes of one run share them."""
    folder = _shared_folder(tmp_path_factory)
    recording = {"TOKENPROXY_STORE_TIMEOUT_S": STORE_TIMEOUT_S, **_recorder(folder)}
    needed = {
        "plugin": EngineProcess(
            model,
            plugin=True,
            api_server_count=2,
            extra_environment=recording,
            log_file=shared_log(folder, "plugin"),
        ),
        "stock": EngineProcess(
            model,
            plugin=False,
            extra_flags=["--enable-scale-out", "--trust-request-chat-template"],
            log_file=shared_log(folder, "stock"),
        ),
    }
    if any("mortal_engine" in getattr(item, "fixturenames", ()) for item in request.session.items):
        needed["mortal"] = EngineProcess(
            thinking_model,
            extra_flags=["--reasoning-parser", "deepseek_r1"],
            extra_environment=recording,
            log_file=shared_log(folder, "mortal"),
        )
    with share_engines(needed, model, folder) as engines:
        for engine in engines.values():
            engine.wait_ready(START_TIMEOUT_S)
        for name in ("plugin", "mortal"):
            if name in engines:
                wait_ready(engines[name].url)
        yield engines


def _shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all processes of a test run with -n; without -n, one of this process."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "engines"
    folder.mkdir(exist_ok=True)
    return folder


def _recorder(folder: Path) -> dict[str, str]:
    """Variables of the engines of a run: they record in one place, whichever process starts them."""
    return {"XDG_STATE_HOME": str(folder / "state")}


@pytest.fixture(scope="session")
def mortal_engine(engines: dict[str, EngineProcess]) -> EngineProcess:
    """An engine with the plugin and a reasoning parser, which the last test that needs it may kill."""
    return engines["mortal"]


@pytest.fixture(scope="session")
def spare(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A stock engine that is not started yet."""
    engine = EngineProcess(model, plugin=False, log_file=tmp_path_factory.mktemp("spare") / "vllm.log")
    try:
        yield engine
    finally:
        engine.stop()


@pytest.fixture
def second(spare: EngineProcess) -> EngineProcess:
    """A stock engine that the test may kill; one that the last test left running serves again."""
    if not _is_healthy(spare):
        spare.stop()
        spare.start()
        spare.wait_ready(START_TIMEOUT_S)
    return spare


@pytest.fixture(scope="session")
def proxies(engines: dict[str, EngineProcess]) -> Iterator[dict[str, str]]:
    """The proxy before the stock engine, with the spelling found out and with the other one forced."""
    stock = engines["stock"].url
    with run_proxy(f"{stock}/v1/") as front, run_proxy(stock, "--token-in", "generate") as generate:
        yield {FRONT: front, GENERATE: generate}


@pytest.fixture(params=[INSIDE, FRONT])
def server(
    request: pytest.FixtureRequest,
    engines: dict[str, EngineProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Served:
    """Each of the ways to run in turn."""
    if request.param == INSIDE:
        recorder = _recorder(_shared_folder(tmp_path_factory))
        return Served(engines["plugin"].url, engines["plugin"], recorder)
    proxies: dict[str, str] = request.getfixturevalue("proxies")
    return Served(proxies[request.param], engines["stock"])


every_spelling = pytest.mark.parametrize("server", [INSIDE, FRONT, GENERATE], indirect=True)
"""For tests that must also hold where ids go in by the generate route."""
only_inside = pytest.mark.parametrize("server", [INSIDE], indirect=True)
only_in_front = pytest.mark.parametrize("server", [FRONT], indirect=True)
"""For long tests of a client. That both ways answer alike is compared by the tests of the routes it calls."""


def _is_healthy(engine: EngineProcess) -> bool:
    try:
        return engine.pid is not None and httpx.get(f"{engine.url}/health", timeout=10).is_success
    except httpx.TransportError:
        return False


class ProxyProcess:
    """`tokenproxy serve` as a process of its own, which can be killed and started again on the same port."""

    def __init__(self, upstream: str, *flags: str) -> None:
        """Nothing runs yet; `flags` are those of the command."""
        port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "proxy.cli", "serve", "--upstream", upstream, "--port", str(port)]
        command += ["--store-timeout-s", STORE_TIMEOUT_S]
        self._command = [*command, *flags]  # of equal flags the last counts
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, client_key: str | None = None) -> None:
        """Start it, and wait until it is ready.

        Args:
            client_key: a key that the engine or the proxy wants. It reaches the proxy with a request.
        """
        self.spawn()
        if client_key is not None:
            _send_key(self.url, client_key)
        wait_ready(self.url, key=client_key)

    def spawn(self) -> None:
        """Start it, and return at once."""
        self._process = subprocess.Popen(self._command)

    def kill(self) -> None:
        """End it with no chance to tidy up."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it in order; it does nothing when none runs."""
        self._end(signal.SIGTERM)

    def _end(self, by: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(by)
            process.wait(30)


@contextmanager
def run_proxy(upstream: str, *flags: str, client_key: str | None = None) -> Iterator[str]:
    """`tokenproxy serve` as a process of its own; the value is its URL, once it is ready."""
    proxy = ProxyProcess(upstream, *flags)
    try:
        proxy.start(client_key)
        yield proxy.url
    finally:
        proxy.stop()


def wait_ready(url: str, timeout_s: float = 120.0, key: str | None = None) -> dict[str, object]:
    """Wait until `/ready` says that an engine answers and that messages can be appended.

    Args:
        key: one with the scope `read`, where the proxy has keys of its own.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    deadline = time.monotonic() + timeout_s
    state: object = None
    while time.monotonic() < deadline:
        try:
            answer = httpx.get(f"{url}/ready", timeout=10, headers=headers)
            state = answer.text
            if answer.status_code == 200 and _can_append(answer.json()["engines"][0]):
                ready: dict[str, object] = answer.json()["engines"][0]
                return ready
        except httpx.TransportError as error:
            state = error
        time.sleep(0.2)
    raise TimeoutError(f"{url} was not ready after {timeout_s:.0f} s: {state}")


def _can_append(engine: dict[str, object]) -> bool:
    """Whether messages can be appended, also without a history: the chat template was examined."""
    return engine.get("append") == "ready" and bool(engine.get("template"))


def _send_key(url: str, key: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            answer = httpx.get(f"{url}/v1/sessions", headers={"authorization": f"Bearer {key}"}, timeout=10)
            if answer.status_code == 200:
                return
        time.sleep(0.2)
    raise TimeoutError(f"{url} let no request with a key through in {timeout_s:.0f} s")
