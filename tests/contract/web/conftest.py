import secrets
from collections.abc import Iterator

import pytest

from tests.contract.web.feed_client import Feed
from tests.support.fake_vllm import FakeVllm
from tests.support.utils import run_proxy


@pytest.fixture
def served(engine: FakeVllm) -> Iterator[Feed]:
    """An empty feed."""
    with run_proxy([engine], store="memory:") as client:
        yield Feed(client)


@pytest.fixture
def name() -> str:
    """The name of a session that no other test uses."""
    return f"s-{secrets.token_hex(6)}"
