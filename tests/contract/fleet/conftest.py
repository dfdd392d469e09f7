"""Fleets of these tests are kept apart from those of other tests, whose engines may get the same ports."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm
from tests.support.tiny_model import TinyModel


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default store is where the weight version of a fleet and what an admin changed are kept."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def start(tiny_model: TinyModel) -> Iterator[Callable[..., FakeVllm]]:
    """Starts fake engines; a given port restarts one."""
    with ExitStack() as stack:
        yield lambda kind=FakeVllm, **options: stack.enter_context(kind(tiny_model, **options))


def shown_state(client: httpx.Client, engine: FakeVllm) -> str:
    """The state of a replica by the metrics; empty if they do not have it."""
    label = f'tokenproxy_replica_state{{replica="{engine.url}",state="'
    lines = client.get("/metrics").text.splitlines()
    shown = [line.removeprefix(label) for line in lines if line.startswith(label) and line.endswith(" 1.0")]
    return shown[0].partition('"')[0] if shown else ""


def completions(engine: FakeVllm) -> int:
    """Number of completions of clients that the engine got."""
    return sum(seen.json.get("max_tokens") != 1 for seen in engine.seen("/v1/chat/completions"))
