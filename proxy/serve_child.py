"""Runs a command until it ends, or the process that started it does: `python -m proxy.serve_child COMMAND`

Its standard input is a pipe from its parent, which closes however the parent ends, by SIGKILL too. The
command and its own processes then get SIGTERM, and SIGKILL when `GRACE_S` seconds have passed.
"""

import os
import signal
import subprocess
import sys
import threading

from proxy.demo.children import end_group

GRACE_S = 30.0


def main() -> None:
    """Run the command; the exit code is its own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent closes the pipe
    command = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_heed_signals
    )
    threading.Thread(target=_end_with_parent, args=[command.pid], daemon=True).start()
    code = command.wait()
    end_group(command.pid, GRACE_S)  # what it leaves behind, as a worker that holds a GPU
    sys.exit(code)


def _heed_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_with_parent(group: int) -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    end_group(group, GRACE_S)


if __name__ == "__main__":
    main()
