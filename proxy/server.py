"""Run the proxy as a server of its own."""

import logging

import uvicorn

from proxy.app import create_app
from proxy.settings import Settings

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run(settings: Settings) -> int:
    """Serve until a signal ends it; returns the exit code."""
    logging.basicConfig(level=settings.log_level.upper(), format=_LOG_FORMAT)
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
        access_log=False,
        timeout_graceful_shutdown=30,
        # SDK clients keep connections for a minute: close later than they do, so that none is cut in use
        timeout_keep_alive=75,
    )
    server = uvicorn.Server(config)
    server.run()
    return 0 if server.started else 1
