"""Which Redis store a URL means: one with all data together, or one whose data are split."""

from proxy.history.store import Limits
from proxy.stores.redis import RedisStore
from proxy.stores.redis_partitions import PartitionedStore
from proxy.stores.redis_servers import RedisServers
from proxy.stores.redis_urls import read_redis_url


def make_redis_store(url: str, limits: Limits) -> RedisStore | PartitionedStore:
    """The store that a URL names, not yet open. Raises ValueError, which quotes no password."""
    servers = RedisServers(read_redis_url(url))
    if servers.url.kind == "cluster" or servers.url.partitions is not None:
        return PartitionedStore(servers, limits)
    return RedisStore(servers, limits)
