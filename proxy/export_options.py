"""What `tokenproxy export` does with its flags in both of its forms, once and with --follow."""

import argparse
import os
import sys
from pathlib import Path

from proxy.errors import UsageError
from proxy.history.store import Limits, Store
from proxy.settings import load_settings
from proxy.stores.memory import MemoryStore
from proxy.stores.sqlite import SqliteStore
from proxy.stores.urls import make_store

STDOUT = "-"


def chosen_store(options: argparse.Namespace) -> Store:
    """The store of the flags or the settings, not yet open. Raises UsageError."""
    try:
        settings = load_settings(options.config, store=options.store)
        limits = Limits(max_bytes=settings.store_max_bytes, max_age_s=settings.store_max_age_s)
        store = make_store(settings.store, limits)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if isinstance(store, MemoryStore):
        raise UsageError(
            "the store memory: exists only inside the proxy: request /v1/sessions/{session}/samples or "
            "/v1/samples from it, or pass --store URL"
        )
    if isinstance(store, SqliteStore) and not store.file.exists():
        raise UsageError(f"no store at {store.file}: pass --store URL with the proxy's own setting `store`")
    return store


def regular_file(out: str) -> Path:
    """The file to write. Raises UsageError if the name is that of something else."""
    path = Path(out)
    if path.exists() and not path.is_file():
        raise UsageError(f"{out} is not a regular file: pass another --out FILE, or --out - for stdout")
    return path


def forget_stdout() -> None:
    """Redirect stdout, whose reader closed the pipe as `head` does: Python flushes it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
