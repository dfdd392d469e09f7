"""Empty stores of each kind: in memory, in a SQLite file, on a Redis server."""

from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.redis_server import run_redis
from tests.support.store_utils import opened
from tokenproxy.record.store import Store


@pytest.fixture(scope="session")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server for the whole run: to start one for each test would cost more than the tests."""
    with run_redis(tmp_path_factory.mktemp("redis"), "--databases", "10000") as port:
        yield port


@pytest.fixture(scope="session")
def databases() -> Iterator[int]:
    return count(1)


@pytest.fixture
def redis_url(redis_port: int, databases: Iterator[int]) -> str:
    return f"redis://127.0.0.1:{redis_port}/{next(databases)}"


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/folder/store.db"


def _urls(*kinds: str) -> Any:
    """A fixture with the URL of an empty store of each of these kinds."""

    @pytest.fixture(params=kinds)
    def url(request: pytest.FixtureRequest) -> str:
        return (
            "memory:" if request.param == "memory" else str(request.getfixturevalue(f"{request.param}_url"))
        )

    return url


url = _urls("memory", "sqlite", "redis")
shared_url = _urls("sqlite", "redis")
"""Of stores that several processes can share."""


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    async with opened(url) as store:
        yield store
