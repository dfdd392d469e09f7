"""Run the proxy as a server of its own."""

import asyncio
import logging

import uvicorn

from proxy.app import create_app
from proxy.history.store import Limits, StoreError
from proxy.settings import Settings
from proxy.stores.urls import make_store

log = logging.getLogger("tokenproxy")

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run(settings: Settings) -> int:
    """Serve until a signal arrives; returns the exit code."""
    logging.basicConfig(level=settings.log_level.upper(), format=_LOG_FORMAT)
    try:
        asyncio.run(_try_store(settings))
    except StoreError as error:
        log.error("the proxy cannot record turns: %s", error)
        return 1
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
        access_log=False,
        timeout_graceful_shutdown=30,
        # SDK clients keep connections for a minute: close later than they do, so that none is closed in use
        timeout_keep_alive=75,
    )
    server = uvicorn.Server(config)
    server.run()
    return 0 if server.started else 1


async def _try_store(settings: Settings) -> None:
    """Open the store and close it again, so that a problem is reported before a port is taken."""
    store = make_store(settings.store, Limits())
    await store.open()
    await store.aclose()
