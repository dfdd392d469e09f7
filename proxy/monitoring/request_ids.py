"""The id of a request, `X-Request-ID`: the client's if it is safe to print, else a new one."""

import os
import re

from proxy.types import Headers

HEADER = b"x-request-id"
LONGEST = 128
"""Characters of an id that is taken from a client."""

# An id appears in logs, headers and the ids of the engine's responses: no character must need quoting
_HARMLESS = re.compile(rb"[A-Za-z0-9._:@=+/~-]{1,%d}" % LONGEST)


def request_id(headers: Headers) -> str:
    """The id that the client sent; a new one, of 32 hexadecimal digits, if that is missing or unusable."""
    for name, value in headers:
        if name == HEADER and _HARMLESS.fullmatch(value):
            return value.decode("ascii")
    return os.urandom(16).hex()


def with_request_id(headers: Headers, identity: str) -> Headers:
    """Replace the request id in the headers."""
    kept = [pair for pair in headers if pair[0] != HEADER]
    kept.append((HEADER, identity.encode("ascii")))
    return kept
