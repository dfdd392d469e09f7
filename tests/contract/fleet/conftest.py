"""Fleets of these tests are kept apart from those of other tests, whose engines may get the same ports."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.contract.fleet.replicas import Start
from tests.support.fake_vllm import FakeVllm
from tests.support.tiny_model import TinyModel


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default store is where the weight version of a fleet and what an admin changed are kept."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def start(tiny_model: TinyModel) -> Iterator[Start]:
    """Starts fake engines of a kind; a given port restarts one."""
    with ExitStack() as stack:
        yield lambda kind=FakeVllm, **options: stack.enter_context(kind(tiny_model, **options))
