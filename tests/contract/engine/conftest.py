from collections.abc import AsyncIterator

import pytest

from tests.support.fake_vllm import FakeVllm
from tokenproxy.engine.http import HttpEngine


@pytest.fixture
def fake(mortal: FakeVllm) -> FakeVllm:
    """A new engine for each test, without the proxy."""
    return mortal


@pytest.fixture
async def engine(fake: FakeVllm) -> AsyncIterator[HttpEngine]:
    engine = HttpEngine(fake.url)
    yield engine
    await engine.aclose()
