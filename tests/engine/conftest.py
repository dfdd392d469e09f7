from collections.abc import AsyncIterator

import pytest

from proxy.engine.http import HttpEngine, make_session
from tests.fake_vllm import FakeVllm


@pytest.fixture
def fake(mortal: FakeVllm) -> FakeVllm:
    """Engines are tried alone here, each with connections of its own."""
    return mortal


@pytest.fixture
async def engine(fake: FakeVllm) -> AsyncIterator[HttpEngine]:
    async with make_session(connect_timeout_s=0.3) as session:
        yield HttpEngine(fake.url, session)
