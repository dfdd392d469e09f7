"""A command that is run for another one: exit codes and signals."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from proxy.agents.child import run_child

_PARENT = """
import os, sys
from proxy.agents.child import run_child
sys.exit(run_child([sys.executable, "-c", sys.argv[1]], os.environ).code)
"""
_CHILD = """
import pathlib, signal, sys, time
file = pathlib.Path({file!r})
signals = []
def note(number, frame):
    signals.append(int(number))
    file.write_text(repr(signals))
for number in ({signals}):
    signal.signal(number, note)
file.write_text("ready")
end = time.monotonic() + {seconds}
while time.monotonic() < end and not (signals and {ends}):
    time.sleep(0.01)
sys.exit(7)
"""


@pytest.mark.parametrize("code", [0, 1, 42])
def test_the_exit_code(code: int) -> None:
    ended = run_child([sys.executable, "-c", f"raise SystemExit({code})"], os.environ)
    assert ended.code == code
    assert ended.seconds > 0


def test_a_command_that_a_signal_ended() -> None:
    assert run_child(["sh", "-c", "kill -9 $$"], os.environ).code == 128 + 9


def test_the_environment_and_the_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert run_child(["sh", "-c", 'test "$A" = b'], {"A": "b", "PATH": os.environ["PATH"]}).code == 0
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(FileNotFoundError):
        run_child(["no-such-command"], os.environ)
    assert signal.getsignal(signal.SIGTERM) is before


def _child(file: Path, seconds: float, ends: bool, *names: str) -> str:
    signals = "".join(f"signal.{name}, " for name in names)
    return _CHILD.format(file=str(file), signals=signals, seconds=seconds, ends=ends)


def _wait(file: Path, text: str) -> None:
    deadline = time.monotonic() + 20
    while not (file.exists() and file.read_text() == text):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT", "SIGUSR1"])
def test_signals_reach_it(tmp_path: Path, name: str) -> None:
    file, number = tmp_path / "signals", getattr(signal, name)
    child = _child(file, 20, True, name)
    # without a terminal, so that SIGINT comes from nobody else
    with subprocess.Popen([sys.executable, "-c", _PARENT, child], start_new_session=True) as parent:
        _wait(file, "ready")
        parent.send_signal(number)
        assert parent.wait(20) == 7
    assert file.read_text() == f"[{int(number)}]"


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT"])
def test_ignored_signals_stay_ignored(tmp_path: Path, name: str) -> None:
    """As of `nohup tokenproxy run ...`, and of commands that a script starts in the background."""
    file = tmp_path / "signals"
    child = f"import pathlib, time; pathlib.Path({str(file)!r}).write_text('ready'); time.sleep(0.5); exit(7)"
    ignoring = f"import signal; signal.signal(signal.{name}, signal.SIG_IGN)\n{_PARENT}"
    with subprocess.Popen([sys.executable, "-c", ignoring, child], start_new_session=True) as parent:
        _wait(file, "ready")
        os.killpg(parent.pid, getattr(signal, name))
        assert parent.wait(20) == 7


def test_ctrl_c_reaches_it_once(tmp_path: Path) -> None:
    """The terminal sends it to both, and programs end at a second one."""
    file = tmp_path / "signals"
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-c", _PARENT, _child(file, 1.0, False, "SIGINT")])
    try:
        _wait(file, "ready")
        os.write(terminal, b"\x03")
        _, status = os.waitpid(process, 0)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 7
    assert file.read_text() == "[2]"
