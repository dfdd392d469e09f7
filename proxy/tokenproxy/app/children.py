"""Servers that this process starts: their environment, their ports, and how to end a process group.

`python -m tokenproxy.app.children COMMAND` runs a command until it ends, or its parent does. Its
standard input is a pipe from its parent, which closes however the parent ends, by SIGKILL too. The command
and its own processes then get SIGTERM, and SIGKILL when `GRACE_S` seconds have passed.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

GRACE_S = 30.0
_FOR_SERVERS = range(20_000, 32_000)
"""Below the ports that Linux gives to connections of clients, from 32,768 on: one of them could take the port
before the server listens, for which vLLM needs seconds."""
_TRIES = 100
_POLL_S = 0.05
_KILL_GRACE_S = 5.0


def free_port(host: str) -> int:
    """A free TCP port of an address of this machine. Another server may take it before it is used.

    Raises:
        OSError: none was found, or `host` is no address of this machine.
    """
    problem = ""
    for port in random.sample(_FOR_SERVERS, _TRIES):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                problem = str(error)
            else:
                return port
    raise OSError(f"{host!r} has no free port ({problem}): choose one, or another host")


def child_environment() -> dict[str, str]:
    """This process's environment, with which a child imports the same packages even if none is installed."""
    specs = [find_spec(name) for name in ("tokenproxy", "chat_tokenizer")]
    folders = [str(Path(spec.origin).resolve().parents[1]) for spec in specs if spec and spec.origin]
    before = os.environ.get("PYTHONPATH")
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join([*folders, *([before] if before else [])])}


def group_members(group: int) -> list[int]:
    """Ids of the running processes in the process group `group`, without zombies.

    Without /proc (macOS) it returns `[group]` while the group exists.
    """
    if not Path("/proc/self/stat").exists():
        return [group] if _signal_group(group, 0) else []
    members = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text(errors="replace")
            except OSError:
                continue  # The process ended meanwhile.
            # The command's name, in parentheses, may itself hold parentheses and spaces.
            state, _parent, member_of = stat[stat.rindex(")") + 1 :].split()[:3]
            if int(member_of) == group and state not in "ZX":
                members.append(int(folder.name))
    return members


def end_group(group: int, grace_s: float) -> list[int]:
    """End a process group: SIGTERM to all, then SIGKILL to those that run after `grace_s` seconds.

    If it is interrupted while it waits, it sends SIGKILL at once. Returns the ids of the processes that
    survived both signals: none, unless one hangs in the kernel.
    """
    try:
        if not _signal_group(group, signal.SIGTERM) or not _wait_gone(group, grace_s):
            return []
    finally:
        _signal_group(group, signal.SIGKILL)
    return _wait_gone(group, _KILL_GRACE_S)


def _wait_gone(group: int, timeout_s: float) -> list[int]:
    """Wait until the group is empty, or `timeout_s` seconds passed; returns its remaining members."""
    deadline = time.monotonic() + timeout_s
    while (left := group_members(group)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return left


def _signal_group(group: int, signal_number: int) -> bool:
    """Send a signal to a process group; returns whether the group exists."""
    try:
        os.killpg(group, signal_number)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """Run the command; the exit code is its own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent closes the pipe
    command = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_heed_signals
    )
    threading.Thread(target=_end_with_parent, args=[command.pid], daemon=True).start()
    code = command.wait()
    end_group(command.pid, GRACE_S)  # its own processes too: a worker would keep the GPU
    sys.exit(code)


def _heed_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_with_parent(group: int) -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    end_group(group, GRACE_S)


if __name__ == "__main__":
    main()
