"""Real engines for the long tests: those of the acceptance tests, and others that a test starts itself."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.acceptance.conftest import START_TIMEOUT_S, WAYS, can_append, server, servers, start_engine
from tests.support.serve_process import ServeProcess
from tests.support.utils import wait_until
from tokenproxy.demo.checkpoint import ensure_checkpoint

__all__ = [
    "START_TIMEOUT_S",
    "WAYS",
    "run_proxy",
    "run_way",
    "server",
    "servers",
    "start_engine",
    "wait_ready",
]

INSIDE, FRONT = WAYS
only_inside = pytest.mark.parametrize("server", [INSIDE], indirect=True)
only_in_front = pytest.mark.parametrize("server", [FRONT], indirect=True)
"""For long tests of a client. That both ways answer alike is shown by the acceptance tests."""


@pytest.fixture(scope="session")
def model() -> Path:
    """The embedded model's checkpoint."""
    return ensure_checkpoint()


@contextmanager
def run_proxy(upstream: str, *flags: str, template: bool = True) -> Iterator[str]:
    """`tokenproxy serve` as a process of its own; the value is its URL, once it is ready."""
    with TemporaryDirectory() as folder, ServeProcess([upstream], Path(folder) / "log", *flags) as proxy:
        wait_ready(proxy.url, template)
        yield proxy.url


@contextmanager
def run_way(
    way: str,
    model: Path,
    log: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    template: bool = True,
) -> Iterator[str]:
    """An engine of the test's own with the plugin, or a proxy in front of it; the value is the URL.

    Args:
        template: whether its model has a chat template.
    """
    with start_engine(model, log, *flags, plugin=way == INSIDE, environment=environment) as engine:
        engine.wait_ready(START_TIMEOUT_S)
        if way == INSIDE:
            wait_ready(engine.url, template)
            yield engine.url
        else:
            with run_proxy(engine.url, "--store", "memory:", template=template) as url:
                yield url


def wait_ready(url: str, template: bool = True) -> None:
    """Wait until every engine of a server answers, and messages can be appended."""
    wait_until(lambda: can_append(url, template), START_TIMEOUT_S)
