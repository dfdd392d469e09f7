"""A TCP relay between a program and the proxy, which loses the end of an answer."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_PIECE_BYTES = 65_536
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of zero seconds: closing is a reset."""


@dataclass
class Relay:
    """Passes bytes on, until an answer holds a text that is to be lost."""

    target: tuple[str, int]
    url: str = ""
    lost: bytes = b""
    """The program's connection is reset in place of the first bytes that hold this text."""
    heads: list[bytes] = field(default_factory=list)
    """The heads of requests."""
    times: int = 0
    """How often an answer was lost."""

    def serve(self, listener: socket.socket) -> None:
        """Accept connections until the listener is closed."""
        while True:
            try:
                program, _ = listener.accept()
            except OSError:
                return
            proxy = socket.create_connection(self.target)
            threading.Thread(target=self._forward, args=(program, proxy), daemon=True).start()
            threading.Thread(target=self._return, args=(proxy, program), daemon=True).start()

    def _forward(self, program: socket.socket, proxy: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := program.recv(_PIECE_BYTES):
                if piece.startswith(b"POST "):
                    self.heads.append(piece.partition(b"\r\n\r\n")[0])
                proxy.sendall(piece)

    def _return(self, proxy: socket.socket, program: socket.socket) -> None:
        """What follows a lost end is still read: the proxy's client did not leave."""
        whole = True
        with contextlib.suppress(OSError):
            while piece := proxy.recv(_PIECE_BYTES):
                if whole and self.lost and self.lost in piece:
                    self.lost, whole = b"", False
                    self.times += 1
                    program.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    program.shutdown(socket.SHUT_RD)
                    program.close()
                if whole:
                    program.sendall(piece)
        proxy.close()
        program.close()


@contextmanager
def relay(url: str) -> Iterator[Relay]:
    """Serve before a proxy until the block ends."""
    parts = urlsplit(url)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        passing = Relay((parts.hostname or "", parts.port or 80))
        passing.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        threading.Thread(target=passing.serve, args=(listener,), daemon=True).start()
        yield passing
        listener.shutdown(socket.SHUT_RDWR)
