from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from proxy.history.store import Store
from tests.support.redis_cluster import RedisCluster, run_cluster
from tests.support.redis_server import run_redis
from tests.support.store_utils import opened


@pytest.fixture(scope="session")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server for the whole run: to start one for each test would cost more than the tests."""
    with run_redis(tmp_path_factory.mktemp("redis")) as port:
        yield port


@pytest.fixture
def redis_url(redis_port: int) -> str:
    """The server, empty."""
    with redis.Redis(port=redis_port) as client:
        client.flushall()
    return f"redis://127.0.0.1:{redis_port}/0"


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """A cluster of three servers for the whole run."""
    with run_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster_url(redis_cluster: RedisCluster) -> str:
    """The cluster, empty."""
    redis_cluster.clear()
    return redis_cluster.url


@pytest.fixture
def cluster1_url(cluster_url: str) -> str:
    """The cluster, empty, for data in one partition."""
    return f"{cluster_url}?partitions=1"


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/folder/store.db"


def _url(kind: str, request: pytest.FixtureRequest) -> str:
    return "memory:" if kind == "memory" else str(request.getfixturevalue(f"{kind}_url"))


@pytest.fixture(params=["memory", "sqlite", "redis", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty store of each kind."""
    return _url(request.param, request)


@pytest.fixture(params=["memory", "sqlite", "redis", "cluster1"])
def whole_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty store of each kind that keeps all rollouts in one place."""
    return _url(request.param, request)


@pytest.fixture(params=["sqlite", "redis", "cluster"])
def shared_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty store of each kind that several processes can share."""
    return _url(request.param, request)


@pytest.fixture(params=["sqlite", "redis", "cluster1"])
def shared_whole_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty store of each kind for several processes that keeps all rollouts in one place."""
    return _url(request.param, request)


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    """An empty store of each kind."""
    async with opened(url) as store:
        yield store


@pytest.fixture
async def whole_store(whole_url: str) -> AsyncIterator[Store]:
    """An empty store of each kind that keeps all rollouts in one place."""
    async with opened(whole_url) as store:
        yield store
