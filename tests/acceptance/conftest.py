"""Two real engines for the whole layer, started at the same time, and the two ways to run on them.

Engine `inside` is vLLM with the plugin and two API server processes. Engine `stock` is vLLM as it is, with a
`tokenproxy serve` process in front of it. Both have every feature switched on that the product relies on.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.ports import held_port
from tests.support.serve_process import ServeProcess
from tests.support.utils import wait_until
from tokenproxy.demo.checkpoint import ensure_checkpoint
from tokenproxy.demo.stack import EngineProcess

START_TIMEOUT_S = 300.0
ENGINE_PYTHON = "TESTS_ENGINE_PYTHON"
"""The variable that names the interpreter of the engines, whose vLLM may be of another version."""
ENGINE_WAY = "TESTS_ENGINE_WAY"
"""The variable that names the way to run which alone is tested; unset, both are."""
ENGINE_LACKS = "TESTS_ENGINE_LACKS"
"""The variable that names flags, with spaces between them, that the engines' release does not know."""
BOTH = ("inside", "in front")
WAYS = tuple(way for way in BOTH if os.environ.get(ENGINE_WAY, way) == way)
_EVERYTHING = (
    "--enable-scale-out",
    "--trust-request-chat-template",
    # it parses reasoning where a request has the template argument `thinking`, and nothing elsewhere
    *("--reasoning-parser", "deepseek_v3"),
)
_STORE_S = "30"
"""How long a request may wait for its store: two engines and the tests share the cores."""
_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "TOKENPROXY_STORE_TIMEOUT_S": _STORE_S}
_CONNECTIONS = 10
"""Each is accepted by one of two API server processes."""
_NO_REUSE = httpx.Limits(max_keepalive_connections=0)
"""Each request has a connection of its own: any API server process may accept it."""


@contextmanager
def start_engine(
    model: Path,
    log_file: Path,
    *flags: str,
    plugin: bool = True,
    api_server_count: int = 1,
    environment: Mapping[str, str] | None = None,
) -> Iterator[EngineProcess]:
    """Start a vLLM server and stop it at the end; it is not ready yet. All tests start engines here."""
    with ExitStack() as stack:
        engine = EngineProcess(
            model,
            port=stack.enter_context(held_port()),
            plugin=plugin,
            api_server_count=api_server_count,
            extra_flags=flags,
            extra_environment=environment,
            log_file=log_file,
            python=os.environ.get(ENGINE_PYTHON, sys.executable),
        )
        stack.callback(engine.stop)
        engine.start()
        yield engine


@dataclass(frozen=True)
class Server:
    """One way to run: a client of it, and the engine that does its work."""

    http: httpx.Client
    engine: EngineProcess

    @property
    def url(self) -> str:
        """Its URL without a path."""
        return str(self.http.base_url).rstrip("/")


def running(engine: EngineProcess) -> float:
    """How many requests an engine works on, by its own metric."""
    lines = httpx.get(f"{engine.url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))


def thinking_checkpoint(model: Path, folder: Path) -> Path:
    """The same model with two of its unused special tokens made ordinary ones: the marks of reasoning."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    marks = {"<jupyter_start>": "<think>", "<jupyter_text>": "</think>"}
    for token in tokenizer["added_tokens"]:
        if token["content"] in marks:
            # special ones are not shown to the parser of whole answers
            token |= {"content": marks[token["content"]], "special": False}
    for unused, mark in marks.items():
        tokenizer["model"]["vocab"][mark] = tokenizer["model"]["vocab"].pop(unused)
    for file in model.iterdir():
        if file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def can_append(url: str, template: bool = True) -> bool:
    """Whether every engine of a server answers, and its chat template, if it has one, was examined."""
    try:
        answer = httpx.get(f"{url}/ready", timeout=30)
    except httpx.TransportError:
        return False
    engines = answer.json().get("engines") or [{"ready": False}]
    ready = all(each["ready"] and each["append"] == "ready" for each in engines)
    return ready and (not template or all(each["template"] for each in engines))


def all_can_append(url: str) -> bool:
    """Whether every API server process behind a URL can, as far as some connections tell."""
    return all(can_append(url) for _ in range(_CONNECTIONS))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The start of the engines has a test of its own, which runs first; what kills an engine runs last.

    Where only one way is tested, the tests of the other one are left out.
    """
    items[:] = [item for item in items if "in front" in WAYS or "front" not in _fixtures(item)]
    items.sort(
        key=lambda item: (
            item.path.name == "test_killed_engine.py",
            item.path.name != "test_start.py",
        )
    )


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """The ways to run, ready."""
    folder = tmp_path_factory.mktemp("engines")
    model = thinking_checkpoint(ensure_checkpoint(), tmp_path_factory.mktemp("thinking"))
    with ExitStack() as stack:
        engines = {}
        for way in WAYS:
            inside, log = way == "inside", folder / f"{way}.log"
            store = {"TOKENPROXY_STORE": f"sqlite:///{folder}/inside.db"} if inside else {}
            engines[way] = stack.enter_context(
                start_engine(
                    model,
                    log,
                    *(flag for flag in _EVERYTHING if flag not in os.environ.get(ENGINE_LACKS, "").split()),
                    plugin=inside,
                    api_server_count=2 if inside else 1,
                    environment=_ENVIRONMENT | store,
                )
            )
        for engine in engines.values():
            engine.wait_ready(START_TIMEOUT_S)
        made = {}
        for way, engine in engines.items():
            url = engine.url
            if way == "in front":
                times = ("--watch-interval-s", "0.5", "--store-timeout-s", _STORE_S)
                flags = ("--store", f"sqlite:///{folder}/front.db", *times)
                url = stack.enter_context(ServeProcess([url], folder / "front.log", *flags)).url
            wait_until(lambda url=url: all_can_append(url), START_TIMEOUT_S)  # type: ignore[misc]
            client = httpx.Client(base_url=url, timeout=90, limits=_NO_REUSE, trust_env=False)
            made[way] = Server(stack.enter_context(client), engine)
        yield made


@pytest.fixture
def front(servers: dict[str, Server]) -> Server:
    """The proxy in front of the stock engine; a test that needs it is left out where there is none."""
    return servers["in front"]


@pytest.fixture(params=WAYS)
def server(request: pytest.FixtureRequest, servers: dict[str, Server]) -> Server:
    return servers[request.param]
