"""Type aliases shared by all packages."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

Headers = list[tuple[bytes, bytes]]
"""Header pairs in ASGI's form: names and values are bytes, names are lower-case."""

Fields = dict[str, msgspec.Raw]
"""The top level of a JSON object; each value is the raw bytes that arrived."""
