"""The start of a server of its own: what is checked before it serves, and what its log tells once it does."""

import asyncio
import ctypes
import logging
import os
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from yarl import URL

from tokenproxy.record.store import Limits, Store, StoreError, StoreUnusable
from tokenproxy.settings import Settings, SettingsError
from tokenproxy.store.guarded import START_S
from tokenproxy.store.urls import make_store, place
from tokenproxy.web.credentials import SINGLE_TENANT
from tokenproxy.web.gate import LOOPBACK_NAMES, is_loopback
from tokenproxy.web.keys import read_keys

log = logging.getLogger("tokenproxy")

_MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Those of a container: control groups, version 2 and 1."""

_M_MMAP_THRESHOLD = -3
"""A parameter of glibc's `mallopt`."""
_LARGE_BLOCK_BYTES = 2**18


def check_address(settings: Settings) -> None:
    """Refuse an address at which the proxy cannot serve.

    Raises:
        SettingsError: an engine has the same one, or the certificate cannot be used.
    """
    local = settings.host in (*LOOPBACK_NAMES, "0.0.0.0", "::")
    names = {settings.host, *(LOOPBACK_NAMES if local else ())}
    own = [url for url in map(URL, settings.upstreams) if url.host in names and url.port == settings.port]
    if own:
        raise SettingsError(f"upstreams: {own[0]} is the proxy's own address: name vLLM's, or another --port")
    try:
        if settings.tls_cert and settings.tls_key:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:
        files = f"{settings.tls_cert} and {settings.tls_key}"
        raise SettingsError(f"tls_cert: {files} are no PEM certificate with its key: {error}") from error


def cache_share(workers: int) -> int:
    """Bytes of each worker's cache of conversations: together an eighth of the memory, each at most 1 GiB."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int(file.read_text()))
    return min(2**30, min(limits) // (8 * workers))


def return_large_blocks() -> None:
    """Let the C library return each large block of memory to the system when it is freed.

    By default glibc keeps freed blocks of up to 32 MiB: after 30 answers of 20 MB the process was 460 MB
    larger, with this setting 54 MB. Other C libraries do not have it.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


async def bind(host: str, port: int) -> list[socket.socket]:
    """Bind the sockets of an address, before engines are asked and workers start. Nothing listens yet.

    `::` stands for all addresses, those of IPv4 too. asyncio's socket for `::` takes IPv6 alone, so another
    one is bound to `0.0.0.0`.

    Raises:
        OSError: an address is taken, or is none of this machine; the message says what to do.
    """
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(asyncio.Protocol, host, port, start_serving=False)
        sockets = [bound.dup() for bound in server.sockets]
        server.close()
        if host == "::":
            sockets += await bind("0.0.0.0", sockets[0].getsockname()[1])
    except OSError as error:
        raise OSError(f"{host}, port {port}: {error.strerror}: pass another --port or --host") from error
    return sockets


async def try_store(settings: Settings) -> None:
    """Open the store and close it again, so that a problem is reported before a port is taken.

    Raises:
        StoreError: the store is required and does not respond, or waiting for it does not help.
    """
    store = make_store(settings.store, Limits())
    opening = asyncio.ensure_future(_open(store, settings))
    await asyncio.wait({opening}, timeout=None if settings.store_required else START_S)
    if not opening.done():
        return
    try:
        opening.result()
    except StoreError as error:
        if settings.store_required or isinstance(error, StoreUnusable):
            raise
    else:
        await store.aclose()


async def _open(store: Store, settings: Settings) -> None:
    await store.open()
    keys = read_keys(settings.api_key_file) if settings.api_key_file else []
    reached = not settings.asks_for_keys or any(key.tenant == SINGLE_TENANT for key in keys)
    if not reached and await store.sessions(limit=1, tenant=SINGLE_TENANT):
        log.warning(
            "the store holds rollouts that were recorded without keys, which no key of a client reaches: "
            "`tokenproxy key NAME --file FILE --tenant ''` makes one for `api_key_file` that does"
        )


def announce(settings: Settings, sockets: Sequence[socket.socket]) -> None:
    """Log where the proxy is, who may use it, and where its record is."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    scheme = "https" if settings.tls_cert else "http"
    url = f"{scheme}://{host}:{sockets[0].getsockname()[1]}"
    if settings.asks_for_keys:
        clients = "clients with one of its keys"
    elif is_loopback(settings.host):
        clients = "every program of this machine"
    else:
        clients = "every client that reaches it"
    log.info("running on %s for %s (workers: %d)", url, clients, settings.workers)
    log.info("turns are recorded in %s; %s/viewer shows them", place(settings.store), url)
