"""A record of turns in memory."""

from collections.abc import AsyncIterator

import pytest

from proxy.history.audit import Auditor
from proxy.history.encoders import EncoderPool
from proxy.history.history import History
from proxy.history.store import Limits
from proxy.metrics import Metrics
from proxy.stores.sqlite import SqliteStore


@pytest.fixture
async def history() -> AsyncIterator[History]:
    """An open record without turns."""
    with EncoderPool(1, 2**20) as encoders:
        made = History(SqliteStore(None, Limits()), encoders, Metrics(), 2**20, Auditor(Metrics(), None))
        await made.open()
        yield made
        await made.aclose()
