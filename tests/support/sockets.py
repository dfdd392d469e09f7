"""Requests written to sockets by hand, for what no HTTP client sends."""

import contextlib
import socket
from http.client import HTTPResponse

import httpx

CHAT = "/v1/chat/completions"
BODY = b'{"messages": [{"role": "user", "content": "Hi"}]}'
HALF_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-slow: "
PATIENCE_S = 20.0


def connect(url: httpx.URL) -> socket.socket:
    return socket.create_connection((url.host, url.port or 80), timeout=PATIENCE_S)


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join((f"POST {path} HTTP/1.1", "host: localhost", *lines, "", "")).encode()


def status_of(connection: socket.socket) -> int:
    """The status of the next response, which is read to its end: its head and its body may come apart."""
    with HTTPResponse(connection) as response:
        response.begin()
        response.read()
        return response.status


def until_closed(connection: socket.socket) -> bytes:
    """What comes until the server closes. A timeout is a failure: it never closed."""
    parts: list[bytes] = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65_536):
            parts.append(part)
    return b"".join(parts)
