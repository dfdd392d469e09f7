import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest

from tests.support.child_environment import python_path_without_torch
from tests.support.fake_vllm import FakeVllm, Variant
from tests.support.store_fixtures import (  # noqa: F401
    databases,
    redis_port,
    redis_url,
    shared_url,
    sqlite_url,
    store,
    url,
)
from tests.support.talk import Talk
from tests.support.tiny_model import TinyModel, make_tiny_model
from tests.support.utils import Pair, run_proxy
from tokenproxy.settings import ENV_PREFIX, Settings

pytest_plugins = ["tests.support.hangs"]

# a first example may wait for imports and caches; other work may slow the rest
hypothesis.settings.register_profile(
    "tokenproxy",
    deadline=None,
    max_examples=60,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tokenproxy")


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is recorded here, and by programs started here, is kept apart from the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def usual_signals() -> None:
    """A run in the background may ignore Ctrl-C and the end of its terminal; programs started here do not."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Settings of the environment do not count, and only tests on a real vLLM start processes with torch."""
    for name in Settings.model_fields:
        monkeypatch.delenv(ENV_PREFIX + name.upper(), raising=False)
    if not {"acceptance", "campaign"} & set(request.node.path.parts):
        monkeypatch.setenv("PYTHONPATH", python_path_without_torch())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def pairs(tiny_model: TinyModel) -> Iterator[Callable[..., Pair]]:
    """One pair of each variant for the whole run: to start and stop one costs more than most tests."""
    started: dict[tuple[Variant, str], Pair] = {}
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        # asked once when a pair starts: what later tests let the engine do must not answer for it
        patch.setattr("tokenproxy.web.credentials.OPEN_S", 3600.0)

        def pair(variant: Variant, resume: str = "failures") -> Pair:
            if (variant, resume) not in started:
                fake = stack.enter_context(FakeVllm(tiny_model, variant))
                client = stack.enter_context(run_proxy([fake], resume=resume))
                started[variant, resume] = Pair(fake, client)
            return started[variant, resume]

        yield pair


@pytest.fixture(params=[Variant.CHAT])
def pair(request: pytest.FixtureRequest, pairs: Callable[..., Pair]) -> Iterator[Pair]:
    """A shared pair, whose engine no test may kill."""
    pair = pairs(request.param, "off" if "resume_off" in request.fixturenames else "failures")
    pair.settle()
    yield pair
    pair.settle()


@pytest.fixture
def resume_off() -> None:
    """Lets turns of the shared pair end where its engine breaks off."""


@pytest.fixture
def fake(pair: Pair) -> FakeVllm:
    """The engine of the shared pair."""
    return pair.fake


@pytest.fixture
def client(pair: Pair) -> httpx.Client:
    """A client of the proxy before `fake`."""
    return pair.client


@pytest.fixture(scope="module")
def engine(tiny_model: TinyModel) -> Iterator[FakeVllm]:
    """An engine of a module's own, with no proxy before it."""
    with FakeVllm(tiny_model) as engine:
        yield engine


@pytest.fixture
def mortal(tiny_model: TinyModel) -> Iterator[FakeVllm]:
    """An engine of the test's own, with no proxy before it."""
    with FakeVllm(tiny_model) as engine:
        yield engine


@pytest.fixture
def talk(pair: Pair, tiny_model: TinyModel) -> Callable[..., Talk]:
    """Makes conversations with the shared pair."""

    def make(**fields: Any) -> Talk:
        return Talk(pair, tiny_model, **fields)

    return make


@pytest.fixture
def own_talk(tiny_model: TinyModel) -> Iterator[Callable[..., Talk]]:
    """Makes conversations with an engine and a proxy of their own."""
    with ExitStack() as stack:

        def make(
            prepare: Callable[[FakeVllm], None] = lambda engine: None,
            model: TinyModel = tiny_model,
            **settings: Any,
        ) -> Talk:
            engine = stack.enter_context(FakeVllm(model))
            prepare(engine)
            client = stack.enter_context(run_proxy([engine], **{"store": "memory:", **settings}))
            return Talk(Pair(engine, client), model)

        yield make
