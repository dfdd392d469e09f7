"""Proxies over recorded sessions, each a process of its own in front of a fake engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.fake_vllm import FakeVllm
from tests.support.serve_process import ServeProcess
from tests.support.tiny_model import TinyModel

_FOREVER_S = "1e10"


@dataclass(frozen=True)
class RecordedProxy:
    """A running proxy whose store holds recorded sessions."""

    url: str
    pid: int
    store: str
    """The URL of its store. Other processes may write to it while the proxy runs."""
    engine: FakeVllm


@contextmanager
def run_recorded_proxy(model: TinyModel, store: str, log: Path, *flags: str) -> Iterator[RecordedProxy]:
    """Serve over a store until the block ends; nothing in it becomes too old."""
    kept = ("--store", store, "--store-max-age-s", _FOREVER_S, "--finish-after-s", "0")
    with FakeVllm(model) as engine, ServeProcess([engine.url], log, *kept, *flags) as process:
        process.wait_ready()
        yield RecordedProxy(process.url, process.pid, store, engine)
