"""A command that is run for another one: exit codes and signals."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.utils import wait_until
from tokenproxy.agents.child import run_child

_PARENT = """
import os, sys
from tokenproxy.agents.child import run_child
sys.exit(run_child([sys.executable, "-c", *sys.argv[1:]], os.environ).code)
"""
_CHILD = """
import pathlib, signal, sys, time
folder, name, longer_s = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
received = []
if name:
    signal.signal(getattr(signal, name), lambda number, frame: received.append(int(number)))
(folder / "ready").touch()
while not received and not (folder / "sent").exists():
    time.sleep(0.01)
time.sleep(longer_s)
(folder / "received").write_text(repr(received))
sys.exit(7)
"""


def test_the_exit_code_and_the_environment() -> None:
    before = signal.getsignal(signal.SIGTERM)
    ended = run_child(["sh", "-c", 'test "$A" = b && exit 42'], {"A": "b", "PATH": os.environ["PATH"]})
    assert ended.code == 42 and ended.seconds > 0
    assert run_child(["sh", "-c", "kill -9 $$"], os.environ).code == 128 + 9
    with pytest.raises(FileNotFoundError):
        run_child(["no-such-command"], os.environ)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signals_reach_it(tmp_path: Path, name: str) -> None:
    # without a terminal, so that SIGINT comes from nobody else
    command = [sys.executable, "-c", _PARENT, _CHILD, str(tmp_path), name, "0"]
    with subprocess.Popen(command, start_new_session=True) as parent:
        wait_until((tmp_path / "ready").exists)
        parent.send_signal(getattr(signal, name))
        assert parent.wait(20) == 7
    assert (tmp_path / "received").read_text() == f"[{int(getattr(signal, name))}]"


def test_ctrl_c_reaches_it_once(tmp_path: Path) -> None:
    """The terminal sends it to both, and programs end at a second one."""
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-c", _PARENT, _CHILD, str(tmp_path), "SIGINT", "0.3"])
    try:
        wait_until((tmp_path / "ready").exists)
        os.write(terminal, b"\x03")
        _, status = os.waitpid(process, 0)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 7
    assert (tmp_path / "received").read_text() == "[2]"
