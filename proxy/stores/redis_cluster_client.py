"""A client of a Redis cluster."""

from typing import Any

from redis import exceptions
from redis.asyncio import RedisCluster


class ClusterClient(RedisCluster):
    """The client of redis-py, but calls that run at the same time do not disturb each other.

    redis-py closes all connections before it asks the servers again who has which slot, also those that other
    calls are using. This one leaves them open: connections to servers that are gone fail when they are used.
    """

    async def aclose(self) -> None:
        """What redis-py calls before it asks the servers again."""
        self._initialize = True

    async def close_all(self) -> None:
        """Close all connections."""
        self._initialize = False
        await super().aclose()

    async def _execute_command(self, target_node: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super()._execute_command(target_node, *args, **kwargs)
        except AttributeError as error:
            # a search for the servers that was given up has closed the connection while it was being made
            raise exceptions.ConnectionError("the connection was closed") from error
