"""`tokenproxy key`: make an API key, and add its digest to a key file."""

import os
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tokenproxy.base.tasks import locked_folder
from tokenproxy.web.keys import KeyFileError, KeyScope, as_yaml, new_key, parse_keys


def add_key(file: Path, name: str, scopes: Sequence[str], tenant: str | None) -> str:
    """Add a new key to a file, which is created if it does not exist; returns the key.

    The file's content, comments included, is kept. The file is replaced atomically, so that a proxy never
    reads half of it.

    Raises:
        KeyFileError: the file, the name or a scope cannot be used.
    """
    key, entry = new_key(
        name, [KeyScope(scope) for scope in dict.fromkeys(scopes)], tenant, datetime.now(UTC).date()
    )
    try:
        with locked_folder(file.resolve().parent):
            before = file.read_text() if file.exists() else ""
            if before.strip() in ("", "[]"):
                before = ""
            elif not before.endswith("\n"):
                before += "\n"
            text = before + as_yaml(entry)
            parse_keys(text, f"the key file {file} with the new key")
            _replace(file, text)
    except OSError as error:
        raise KeyFileError(f"cannot write the key file {file}: {error.strerror}") from error
    return key


def _replace(file: Path, text: str) -> None:
    target = file.resolve()  # replace the file that a link points to, not the link
    # a file that exists keeps its permissions; a new one is its owner's
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    try:
        with os.fdopen(descriptor, "w") as new:
            new.write(text)
            new.flush()
            os.fsync(new.fileno())
        Path(name).chmod(mode)
        Path(name).replace(target)
    except BaseException:  # Ctrl-C too: the temporary file holds keys
        Path(name).unlink(missing_ok=True)
        raise
