"""Child processes of the demo: what they see, and how a whole family of them is ended."""

import os
import signal
import time
from pathlib import Path

_POLL_S = 0.05
_KILL_GRACE_S = 5.0


def child_environment() -> dict[str, str]:
    """This process's environment, with this very `proxy` importable in a child, installed or not."""
    root = str(Path(__file__).resolve().parents[2])
    before = os.environ.get("PYTHONPATH")
    return dict(os.environ) | {"PYTHONPATH": f"{root}{os.pathsep}{before}" if before else root}


def group_members(group: int) -> list[int]:
    """Process ids in the process group `group` that still run; zombies do not count.

    Without /proc (macOS) the answer is `[group]` while the group exists.
    """
    if not Path("/proc/self/stat").exists():
        return [group] if _signal_group(group, 0) else []
    members = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text(errors="replace")
            except OSError:
                continue  # It ended while the folder was read.
            # The command's name, in parentheses, may hold anything: the fields start after the last one.
            state, _parent, of_group = stat[stat.rindex(")") + 1 :].split()[:3]
            if int(of_group) == group and state not in "ZX":
                members.append(int(folder.name))
    return members


def end_group(group: int, grace_s: float) -> list[int]:
    """Send SIGTERM to the process group, SIGKILL to what is left after `grace_s` seconds.

    Interrupted while it waits, it sends SIGKILL at once. Returns the ids that outlived both signals, which is
    empty unless the kernel holds one.
    """
    try:
        if not _signal_group(group, signal.SIGTERM) or not _wait_gone(group, grace_s):
            return []
    finally:
        _signal_group(group, signal.SIGKILL)
    return _wait_gone(group, _KILL_GRACE_S)


def _wait_gone(group: int, timeout_s: float) -> list[int]:
    """Members of the group that are left when it is empty, or after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while (left := group_members(group)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return left


def _signal_group(group: int, signal_number: int) -> bool:
    """Whether there was a group to signal."""
    try:
        os.killpg(group, signal_number)
    except ProcessLookupError:
        return False
    return True
