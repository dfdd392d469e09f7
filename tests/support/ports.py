"""A port for a server that must be told one: bound here until the test ends, so that nobody else gets it."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A port on which only servers with SO_REUSEADDR or SO_REUSEPORT can listen: asyncio, Redis, nginx, vLLM.

    It is bound here and never listened on: until a server listens, connections are refused. A server that can
    bind port 0 and tell what it got needs none of this.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, 0))
        yield holder.getsockname()[1]
