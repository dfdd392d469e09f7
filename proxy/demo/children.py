"""Child processes of the demo: their environment, and how to end a process group."""

import os
import signal
import time
from pathlib import Path

_POLL_S = 0.05
_KILL_GRACE_S = 5.0


def child_environment() -> dict[str, str]:
    """This process's environment, with which a child imports the same `proxy` even if it is not installed."""
    root = str(Path(__file__).resolve().parents[2])
    before = os.environ.get("PYTHONPATH")
    return dict(os.environ) | {"PYTHONPATH": f"{root}{os.pathsep}{before}" if before else root}


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
