import secrets
from collections.abc import Iterator

import pytest

from tests.contract.web.feed_client import Feed
from tests.support.fake_vllm import FakeVllm
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy


@pytest.fixture(scope="module")
def engine(tiny_model: TinyModel) -> Iterator[FakeVllm]:
    with FakeVllm(tiny_model) as engine:
        yield engine


@pytest.fixture
def served(engine: FakeVllm) -> Iterator[Feed]:
    """An empty feed."""
    with run_proxy([engine], store="memory:") as client:
        yield Feed(client)


@pytest.fixture
def name() -> str:
    """The name of a session that no other test uses."""
    return f"s-{secrets.token_hex(6)}"
