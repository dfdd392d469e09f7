"""Free ports for servers that this process starts."""

import random
import socket

_FOR_SERVERS = range(20_000, 32_000)
"""Below the ports that Linux gives to connections of clients, from 32,768 on: one of them could take the port
before the server listens, for which vLLM needs seconds."""
_TRIES = 100


def free_port(host: str) -> int:
    """A free TCP port of an address of this machine. Another server may take it before it is used.

    Raises:
        OSError: none was found, or `host` is no address of this machine.
    """
    problem = ""
    for port in random.sample(_FOR_SERVERS, _TRIES):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                problem = str(error)
            else:
                return port
    raise OSError(f"{host!r} has no free port ({problem}): choose one, or another host")
