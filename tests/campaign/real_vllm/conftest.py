"""Real engines for the long tests: those of the acceptance tests, and others that a test starts itself."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from proxy.demo.checkpoint import ensure_checkpoint
from tests.acceptance.conftest import START_TIMEOUT_S, can_append, server, servers, start_engine
from tests.support.quiet import quiet
from tests.support.serve_process import ServeProcess
from tests.support.utils import wait_until

__all__ = ["START_TIMEOUT_S", "run_proxy", "server", "servers", "start_engine", "wait_ready"]

INSIDE, FRONT = "inside", "in front"
only_inside = pytest.mark.parametrize("server", [INSIDE], indirect=True)
only_in_front = pytest.mark.parametrize("server", [FRONT], indirect=True)
"""For long tests of a client. That both ways answer alike is shown by the acceptance tests."""


@pytest.fixture(scope="session")
def model() -> Path:
    """The embedded model's checkpoint."""
    return ensure_checkpoint(progress=quiet)


def checkpoint_with(model: Path, folder: Path, name: str, content: dict[str, Any]) -> Path:
    """A checkpoint in `folder` with the files of another, of which one JSON file has other content."""
    folder.mkdir(exist_ok=True)
    for file in model.iterdir():
        if file.name != name:
            (folder / file.name).symlink_to(file)
    (folder / name).write_text(json.dumps(content))
    return folder


@contextmanager
def run_proxy(upstream: str, *flags: str, client_key: str | None = None) -> Iterator[str]:
    """`tokenproxy serve` as a process of its own; the value is its URL, once it is ready.

    Args:
        client_key: a key that the engine or the proxy wants. It reaches the proxy with a request.
    """
    with TemporaryDirectory() as folder, ServeProcess([upstream], Path(folder) / "log", *flags) as proxy:
        if client_key is not None:
            headers = {"authorization": f"Bearer {client_key}"}
            wait_until(lambda: httpx.get(f"{proxy.url}/v1/sessions", headers=headers).is_success, 60)
        wait_ready(proxy.url, client_key)
        yield proxy.url


def wait_ready(url: str, key: str | None = None) -> None:
    """Wait until every engine of a server answers, and messages can be appended.

    Args:
        key: one with the scope `read`, where the proxy has keys of its own.
    """
    wait_until(lambda: can_append(url, key), START_TIMEOUT_S)


def forced(token: int, count: int = 2) -> dict[str, Any]:
    """Options with which the engine samples one token, `count` times."""
    return {"logit_bias": {str(token): 100.0}, "max_tokens": count, "temperature": 0}


def replicas(http: httpx.Client) -> dict[str, dict[str, Any]]:
    """The state of each replica of a proxy, by its URL."""
    return {each["engine"]: each for each in http.get("/admin/replicas").json()["replicas"]}


def ready(http: httpx.Client) -> int:
    """How many replicas of a proxy are ready."""
    return sum(each["ready"] for each in replicas(http).values())
