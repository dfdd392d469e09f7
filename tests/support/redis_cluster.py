"""A Redis cluster of the tests' own: masters, and replicas of them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.redis_server import RedisServer
from tests.support.utils import wait_until

_SLOTS = 16_384


class RedisNode(RedisServer):
    """A server of a cluster."""

    def __init__(self, folder: Path, *options: str, node_timeout_ms: int) -> None:
        folder.mkdir()
        super().__init__(folder)
        self.bus_port = self.hold_port()
        fixed = ("--cluster-enabled", "yes", "--cluster-port", str(self.bus_port))
        times = ("--cluster-node-timeout", str(node_timeout_ms), "--repl-diskless-sync-delay", "0")
        self.options = (*fixed, *times, *options)

    def call(self, *command: Any) -> Any:
        """The reply to a command."""
        with redis.Redis(port=self.port, retry=Retry(NoBackoff(), 0)) as client:
            return client.execute_command(*command)

    @property
    def id(self) -> str:
        """Its name in the cluster."""
        return str(self.call("CLUSTER", "MYID").decode())


class RedisCluster:
    """Masters with equal shares of the slots, and a replica of each if wanted."""

    def __init__(self, masters: Sequence[RedisNode], replicas: Sequence[RedisNode]) -> None:
        self.masters = masters
        self.replicas = replicas

    @property
    def url(self) -> str:
        """Of the store; names only the first master."""
        return f"redis+cluster://127.0.0.1:{self.masters[0].port}"

    def form(self) -> None:
        """Make the servers one cluster, and wait until all know it."""
        nodes = [*self.masters, *self.replicas]
        count = len(self.masters)
        for i, master in enumerate(self.masters):
            master.call("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
            master.call("CLUSTER", "ADDSLOTSRANGE", i * _SLOTS // count, (i + 1) * _SLOTS // count - 1)
        for node in nodes[1:]:
            nodes[0].call("CLUSTER", "MEET", "127.0.0.1", node.port, node.bus_port)
        wait_until(lambda: all(_count(node, "cluster_known_nodes") == len(nodes) for node in nodes))
        for master, replica in zip(self.masters, self.replicas, strict=False):
            name = master.id
            wait_until(lambda: name in _text(replica, "CLUSTER", "NODES"))  # noqa: B023
            replica.call("CLUSTER", "REPLICATE", name)
        for replica in self.replicas:
            wait_until(lambda: "master_link_status:up" in _text(replica, "INFO", "replication"))  # noqa: B023
        wait_until(lambda: all("cluster_state:ok" in _text(node, "CLUSTER", "INFO") for node in nodes))
        wait_until(lambda: all(_count(node, "cluster_size") == count for node in nodes))

    def keys(self) -> list[bytes]:
        """The names of all keys, sorted."""
        return sorted(key for master in self.masters for key in master.call("KEYS", "*"))


@contextmanager
def run_cluster(
    folder: Path, *options: str, replicas: int = 0, node_timeout_ms: int = 2000
) -> Iterator[RedisCluster]:
    """A cluster of three masters that keeps nothing."""
    nodes = [
        RedisNode(folder / str(number), *options, node_timeout_ms=node_timeout_ms)
        for number in range(3 + replicas)
    ]
    with ExitStack() as stack:
        for node in nodes:
            node.start()
            stack.callback(node.kill)
        cluster = RedisCluster(nodes[:3], nodes[3:])
        cluster.form()
        yield cluster


def is_up_to_date(replica: RedisServer, master: RedisServer) -> bool:
    """Whether a replica has all that its master has."""
    with redis.Redis(port=replica.port) as one, redis.Redis(port=master.port) as other:
        copied, own = one.info("replication"), other.info("replication")
    linked = copied.get("master_link_status") == "up"
    return linked and bool(copied.get("slave_repl_offset") == own["master_repl_offset"])


def _text(node: RedisNode, *command: str) -> str:
    reply = node.call(*command)
    if isinstance(reply, dict):
        return "\n".join(f"{name}:{value}" for name, value in reply.items())
    return str(reply.decode())


def _count(node: RedisNode, name: str) -> int:
    lines = _text(node, "CLUSTER", "INFO").splitlines()
    return next(int(line.partition(":")[2]) for line in lines if line.startswith(f"{name}:"))
