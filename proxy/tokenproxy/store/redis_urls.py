"""What the URL of a Redis store names: one server, a cluster, or a master that sentinels know.

    redis://USER:PASSWORD@HOST:6379/DB
    redis+cluster://USER:PASSWORD@HOST:6379,HOST2:6379
    redis+sentinel://USER:PASSWORD@HOST:26379,HOST2:26379/SERVICE/DB

`rediss` instead of `redis` uses TLS. Options after `?` are those of redis-py, such as `ssl_ca_certs`, and
`sentinel_username`, `sentinel_password`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from redis.asyncio.connection import parse_url

Kind = Literal["server", "cluster", "sentinel"]
_KINDS: dict[str, Kind] = {"": "server", "cluster": "cluster", "sentinel": "sentinel"}
"""By what follows the scheme after `+`."""
_PORTS = {"server": 6379, "cluster": 6379, "sentinel": 26379}
_FORMS = {
    "server": "redis://user:password@host:6379/0",
    "cluster": "redis+cluster://user:password@host:6379,host2:6379",
    "sentinel": "redis+sentinel://user:password@host:26379,host2:26379/service/0",
}


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A URL, read."""

    kind: Kind
    hosts: tuple[tuple[str, int], ...]
    """Servers of the cluster, or sentinels; more than one only of these."""
    service: str
    """Name of the master that the sentinels know; empty without sentinels."""
    options: Mapping[str, Any]
    """Arguments of a connection of redis-py, without its host and port; they hold the password."""
    sentinel_options: Mapping[str, Any]
    """The same for connections to the sentinels."""
    tls: bool
    name: str
    """The URL without user, password and options."""


def read_redis_url(url: str) -> RedisUrl:
    """Read a URL.

    Raises:
        ValueError: it cannot be read; the message quotes no password.
    """
    base, _, suffix = url.partition(":")[0].partition("+")
    kind = _KINDS[suffix]
    try:
        return _read(url, base, kind)
    except (ValueError, TypeError):
        # the cause may quote a password
        raise ValueError(
            f"not a Redis URL; it looks like {_FORMS[kind]}, special characters as %XX"
        ) from None


def _read(url: str, base: str, kind: Kind) -> RedisUrl:
    parts = urlsplit(url)
    credentials, _, places = parts.netloc.rpartition("@")
    hosts = tuple(_host(place, _PORTS[kind]) for place in places.split(","))
    service, db = _path(parts.path, kind)
    if kind == "server" and len(hosts) > 1:
        raise ValueError("a single server has one host")
    at = f"{credentials}@" if credentials else ""
    options: dict[str, Any] = dict(parse_url(f"{base}://{at}host{db}?{parts.query}"))
    del options["host"]
    tls = base == "rediss"
    sentinel = {name.removeprefix("sentinel_"): options.pop(name) for name in _SENTINEL if name in options}
    sentinel |= {name: value for name, value in options.items() if name.startswith(("ssl_", "socket_"))}
    suffix = "" if kind == "server" else f"+{kind}"
    path = f"/{service}" if service else ""
    at_hosts = ",".join(f"{host}:{port}" for host, port in hosts)
    db_name = "" if kind == "cluster" else f"/{options.get('db', 0)}"
    return RedisUrl(
        kind=kind,
        hosts=hosts,
        service=service,
        options=options,
        sentinel_options=sentinel,
        tls=tls,
        name=f"{base}{suffix}://{at_hosts}{path}{db_name}",
    )


_SENTINEL = ("sentinel_username", "sentinel_password")


def _host(place: str, port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{place}")
    return unquote(parts.hostname or "localhost"), parts.port or port


def _path(path: str, kind: str) -> tuple[str, str]:
    """The service and the path that names the database."""
    if kind == "server":
        return "", path
    if kind == "cluster":
        if path.strip("/") not in ("", "0"):
            raise ValueError("a cluster has only database 0")
        return "", ""
    service, _, db = path.strip("/").partition("/")
    if not service or (db and not db.isdigit()):
        raise ValueError("sentinels need the name of a service")
    return unquote(service), f"/{db or 0}"
