"""The default folder of the proxy's files."""

import os
from pathlib import Path


def state_folder() -> Path:
    """The user's state folder, as the XDG base directory specification names it."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "tokenproxy"
