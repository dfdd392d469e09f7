"""A record of turns in memory."""

from collections.abc import AsyncIterator

import pytest

from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.appending import Auditor
from tokenproxy.record.encoders import EncoderPool
from tokenproxy.record.history import History
from tokenproxy.record.store import Limits
from tokenproxy.store.sqlite import SqliteStore


@pytest.fixture
async def history() -> AsyncIterator[History]:
    """An open record without turns."""
    encoders = EncoderPool(1, 2**20)
    made = History(SqliteStore(None, Limits()), encoders, Metrics(), 2**20, Auditor(Metrics(), None))
    await made.open()
    yield made
    await made.aclose()
    encoders.shutdown()
