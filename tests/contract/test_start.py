"""What the log of a server tells once it serves."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenproxy.app import start
from tokenproxy.app.start import announce, bind
from tokenproxy.settings import Settings


@pytest.mark.parametrize("host, families", [("::", "46"), ("0.0.0.0", "4"), ("127.0.0.1", "4")])
def test_all_addresses_are_those_of_ipv4_too(host: str, families: str) -> None:
    try:
        sockets = asyncio.run(bind(host, 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    names = {socket.AF_INET: "4", socket.AF_INET6: "6"}
    assert "".join(sorted(names[bound.family] for bound in sockets)) == families
    assert len({bound.getsockname()[1] for bound in sockets}) == 1
    for bound in sockets:
        bound.close()


@pytest.mark.parametrize(
    "settings, told",
    [
        ({}, ["for every program of this machine", "/rollouts.db; http://127.0.0.1:PORT/viewer shows"]),
        ({"host": "0.0.0.0"}, ["on http://0.0.0.0:PORT for every client"]),
        ({"api_key": ["hidden"]}, ["for clients with one of its keys"]),
        ({"store": "redis://u:hidden@h:1/0?password=hidden"}, ["recorded in redis://h:1/0; http"]),
        ({"store": "sqlite:///a@b/x.db"}, ["recorded in /a@b/x.db; "]),
        ({"store": "memory:"}, ["recorded in memory:; "]),
    ],
)
def test_the_start_tells_address_clients_and_record(
    settings: dict[str, Any], told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tokenproxy")
    sockets = asyncio.run(bind("127.0.0.1", 0))
    announce(Settings(**settings), sockets)
    text = caplog.text.replace(str(sockets[0].getsockname()[1]), "PORT")
    for bound in sockets:
        bound.close()
    assert [words for words in told if words not in text] == [] and "hidden" not in text


def test_workers_share_an_eighth_of_the_memory_of_their_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_container = tmp_path / "memory.max"
    monkeypatch.setattr(start, "_MEMORY_LIMITS", (tmp_path / "missing", of_container))
    of_container.write_text(f"{2**30}\n")
    assert start.cache_share(1) == 2**27
    assert start.cache_share(4) == 2**25
    of_container.write_text("max\n")
    assert 2**25 < start.cache_share(1) <= 2**30


_LARGE_BLOCKS = """
import sys
from pathlib import Path
from tokenproxy.app.start import return_large_blocks

if "return" in sys.argv:
    return_large_blocks()
del (first := bytearray(30_000_000))[:]  # glibc keeps blocks of this size from now on
del first
blocks, small = [], []
for _ in range(40):
    blocks.append(b"x" * 5_000_000)
    small.append(b"x" * 50_000)
del blocks
print(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
"""


def test_large_blocks_are_returned_when_they_are_freed() -> None:
    """Where the C library is glibc; else both are as small."""
    kept, returned = (
        int(
            subprocess.run(
                [sys.executable, "-c", _LARGE_BLOCKS, word], capture_output=True, check=True
            ).stdout
        )
        for word in ("keep", "return")
    )
    assert returned < max(kept / 2, 120e6), (kept, returned)
