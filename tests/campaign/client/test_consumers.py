"""Consumers and proxies that are killed: every rollout is delivered, in order."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

from tests.support.fake_vllm import FakeVllm
from tests.support.ports import held_port
from tests.support.serve_process import ServeProcess, is_process
from tests.support.talk import user
from tests.support.utils import wait_until
from tokenproxy.client import Client

_ROOT = Path(__file__).parents[3]
_NAMES = [f"r{number:02}" for number in range(20)]


class _Consumer:
    """A trainer in a process of its own, and what it printed."""

    def __init__(self, url: str, name: str, log: Path, hang_at: str = "-") -> None:
        self._log = log
        with log.open("ab") as out:
            command = [sys.executable, "-m", "tests.campaign.client.consumer", url, name, hang_at]
            self.process = subprocess.Popen(command, cwd=_ROOT, stdout=out)

    @property
    def read(self) -> list[str]:
        """The rollouts that it got, all of its runs together."""
        return [line.split()[0] for line in self._log.read_text().splitlines()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()


def _finish(client: Client, names: list[str]) -> None:
    for name in names:
        client.token_turn(messages=[user(name)], session=name)
        client.set_reward(name, 1.0)


def _kill_all(proxy: ServeProcess) -> None:
    """Kill a proxy with its workers, as a machine that loses power does."""
    processes = [proxy.pid, *proxy.workers]
    for process in processes:
        os.kill(process, signal.SIGKILL)
    proxy.wait()
    wait_until(lambda: not any(map(is_process, processes)))


def test_consumers_and_proxies_may_be_killed(mortal: FakeVllm, tmp_path: Path) -> None:
    flags = ("--store", f"sqlite://{tmp_path}/rollouts.db", "--workers", "2")
    with (
        held_port() as port,
        ServeProcess([mortal.url], tmp_path / "log", *flags, port=port) as proxy,
        Client(proxy.url) as client,
    ):
        proxy.wait_workers_ready(2)
        log, other_log = tmp_path / "a", tmp_path / "b"
        with _Consumer(proxy.url, "b", other_log) as other:
            with _Consumer(proxy.url, "a", log, hang_at="r04") as first:
                _finish(client, _NAMES[:10])
                # killed between its request and its acknowledgement
                wait_until(lambda: first.read[-1:] == ["r04"])
            got = first.read
            assert got == _NAMES[:5]
            waiting = {consumer.consumer: consumer.waiting for consumer in client.consumers()}
            assert waiting["a"] >= 10 - 4
            _kill_all(proxy)
            proxy.start()
            proxy.wait_workers_ready(2)
            _finish(client, _NAMES[10:])
            with _Consumer(proxy.url, "a", log) as again:
                wait_until(lambda: again.read[-1:] == _NAMES[-1:])
                second = again.read[len(got) :]
            wait_until(lambda: other.read[-1:] == _NAMES[-1:])
        # what the first run had not acknowledged comes again, and nothing is left out
        assert second[0] <= "r04" and second == _NAMES[_NAMES.index(second[0]) :]
        assert list(dict.fromkeys(other.read)) == _NAMES
    assert "Traceback" not in proxy.text
