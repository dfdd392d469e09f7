"""Starting the proxy as a server of its own."""

from pathlib import Path

import pytest

from proxy.server import run
from proxy.settings import Settings


def test_a_store_that_cannot_be_used_is_said_before_serving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "rollouts.db"
    file.write_bytes(b"no database" * 1000)
    assert run(Settings(upstreams=["http://127.0.0.1:1"], port=0, store=f"sqlite://{file}")) == 1
    assert str(file) in caplog.text
