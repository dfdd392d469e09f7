"""Which store a URL means."""

import re
from pathlib import Path

from tokenproxy.record.store import Limits, Store
from tokenproxy.store.sqlite import SqliteStore

STORE_URLS = {
    "memory:": "in this process; gone when it ends",
    "sqlite:///absolute/path.db": "a file for all processes of one machine; sqlite:relative/path.db too",
    "redis://host:6379/0": "Redis or Valkey, for several machines; valkey:// too, with TLS rediss:// and valkeys://",
    "redis+cluster://host:6379,host2:6379": "a cluster of them",
    "redis+sentinel://host:26379,host2:26379/service/0": "the master that sentinels name",
}
"""The forms of URLs, with what each is for."""
_REDIS = {
    f"{name}{kind}": f"{base}{kind}"
    for name, base in {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}.items()
    for kind in ("", "+cluster", "+sentinel")
}


def make_store(url: str, limits: Limits) -> Store:
    """The store that a URL names, not yet open.

    Raises:
        ValueError: there is no such store; the message says which there are, and quotes no password.
    """
    scheme, colon, rest = url.partition(":")
    if colon and scheme == "memory" and not rest:
        return SqliteStore(None, limits)
    if colon and scheme == "sqlite" and (path := _path(rest)):
        return SqliteStore(path, limits)
    if colon and scheme in _REDIS:
        # read only by those who use it: it takes longer than all the rest here
        from tokenproxy.store.redis import RedisStore

        return RedisStore(f"{_REDIS[scheme]}:{rest}", limits)
    forms = "; ".join(f"{form} ({meaning})" for form, meaning in STORE_URLS.items())
    raise ValueError(f"no store has a URL like '{scheme}{colon}{'...' if rest else ''}'. There are: {forms}")


def place(url: str) -> str:
    """Where a store is, for people: its file, or its servers without user, password and options."""
    scheme, _, rest = url.partition(":")
    return str(_path(rest)) if scheme == "sqlite" else re.sub("//.*@", "//", url).partition("?")[0]


def _path(rest: str) -> Path | None:
    """`///absolute`, `///~/of/the/user` or `relative`; None for a host, and for no path."""
    if rest.startswith("//"):
        rest = rest[2:]
        if not rest.startswith("/"):
            return None
        rest = rest.lstrip("/")
        rest = rest if rest.startswith("~") else f"/{rest}"
    return Path(rest).expanduser().absolute() if rest.strip("/") else None
