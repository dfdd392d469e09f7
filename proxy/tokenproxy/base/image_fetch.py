"""Loads images from the web: from hosts that are allowed, never from private addresses."""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import httpx

from tokenproxy.base.images import MAX_BYTES, InvalidImage

TIMEOUT_S = 10.0
"""How long loading an image may take."""
_REQUESTS = 3
"""For one image: the first, and those after redirects."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_LOCAL_NETWORKS = (
    ipaddress.IPv6Network("64:ff9b:1::/48"),  # NAT64 within an organisation (RFC 8215)
    ipaddress.IPv6Network("::/96"),  # IPv4-compatible addresses (RFC 4291, deprecated)
)
"""Networks that Python counts as global, and that lead to private addresses."""


class ImageFetcher:
    """Loads images by their URL.

    The name is looked up once, every address of it must be public, and the connection goes to that address:
    a name that later means another address gets nothing.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        max_bytes: int = MAX_BYTES,
        timeout_s: float = TIMEOUT_S,
        find_address: Callable[[str, int], Awaitable[str]] | None = None,
    ) -> None:
        """Load nothing yet.

        Args:
            hosts: names from which images are loaded; a name with a dot in front allows its subdomains.
            find_address: looks up the address of a host and port; by default a public one.
        """
        self._find_address = find_address or public_address
        self._hosts = tuple(host.lower() for host in hosts)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._tls: ssl.SSLContext | None = None

    async def fetch(self, url: str) -> bytes:
        """The bytes of an image.

        Raises:
            InvalidImage: its host is not allowed or has a private address, it is too large or does not come
                in time, or the server responds with an error.
        """
        try:
            async with asyncio.timeout(self._timeout_s), AsyncExitStack() as stack:
                client = await stack.enter_async_context(await self._client())
                for _ in range(_REQUESTS):
                    response = await stack.enter_async_context(_response(client, await self._request(url)))
                    if not response.is_redirect:
                        return await self._body(response)
                    url = str(httpx.URL(url).join(response.headers.get("location", "")))
        except TimeoutError as error:
            raise InvalidImage(f"it did not arrive within {self._timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise InvalidImage(f"it could not be loaded: {error or type(error).__name__}") from error
        raise InvalidImage("it could not be loaded: too many redirects")

    async def _client(self) -> httpx.AsyncClient:
        if self._tls is None:  # a client that makes its own reads the certificates on the event loop: 14 ms
            self._tls = await asyncio.to_thread(httpx.create_ssl_context, trust_env=False)
        return httpx.AsyncClient(trust_env=False, verify=self._tls)

    async def _request(self, url: str) -> httpx.Request:
        """The request to the address of the host, which keeps the host's name for TLS and in its headers."""
        target = httpx.URL(url)
        host = target.host.lower()
        if target.scheme not in ("http", "https") or target.userinfo:
            raise InvalidImage("its URL must begin with http:// or https://, without credentials")
        if not any(host == name or (name.startswith(".") and host.endswith(name)) for name in self._hosts):
            raise InvalidImage(f"images are not loaded from {host!r} (`image_hosts`)")
        address = await self._find_address(host, target.port or (443 if target.scheme == "https" else 80))
        headers = {"host": target.netloc.decode(), "accept": "image/*"}
        extensions = {"sni_hostname": host}
        return httpx.Request("GET", target.copy_with(host=address), headers=headers, extensions=extensions)

    async def _body(self, response: httpx.Response) -> bytes:
        if response.status_code != 200:
            raise InvalidImage(f"its server responded with status {response.status_code}")
        parts, size = [], 0
        async for part in response.aiter_bytes():
            parts.append(part)
            size += len(part)
            if size > self._max_bytes:
                raise InvalidImage(f"it has more than {self._max_bytes} bytes")
        return b"".join(parts)


@asynccontextmanager
async def _response(client: httpx.AsyncClient, request: httpx.Request) -> AsyncIterator[httpx.Response]:
    """The response to a request, its body not read yet; closed at the end."""
    response = await client.send(request, stream=True)
    try:
        yield response
    finally:
        await response.aclose()


async def public_address(host: str, port: int) -> str:
    """The first address of a host. Raises InvalidImage if any of its addresses is not public."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if not _is_public(address):
            raise InvalidImage(f"{host!r} has the private address {address}")
    return addresses[0]


def _is_public(address: str) -> bool:
    """Whether an address is public, and so is the IPv4 address in it, which a gateway would connect to."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.is_site_local or any(ip in network for network in _LOCAL_NETWORKS):
            return False
        ip = ip.ipv4_mapped or ip.sixtofour or _translated(ip) or ip
    return ip.is_global and not ip.is_multicast


def _translated(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that a NAT64 gateway translates an address to; None if it is another address."""
    return ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF) if ip in _NAT64 else None
