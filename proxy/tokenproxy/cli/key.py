"""`tokenproxy key`: make an API key, and add its digest to a key file."""

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tokenproxy.base.files import locked_folder, whole_file
from tokenproxy.web.keys import KeyFileError, KeyScope, as_yaml, new_key, parse_keys


def run_key(options: argparse.Namespace) -> int:
    """Add a key and print it; returns the exit code. Raises KeyFileError."""
    scopes = options.scope or ["inference", "read"]
    print(add_key(options.file, options.name, scopes, options.tenant))
    print(
        f"tokenproxy: added to {options.file} with {', '.join(dict.fromkeys(scopes))}. "
        "Keep the key above: it is not shown again",
        file=sys.stderr,
    )
    return 0


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
    target = file.resolve()  # the file that a link points to is replaced, not the link
    try:
        with locked_folder(target.parent):
            before = file.read_text() if file.exists() else ""
            if before.strip() in ("", "[]"):
                before = ""
            elif not before.endswith("\n"):
                before += "\n"
            text = before + as_yaml(entry)
            parse_keys(text, f"the key file {file} with the new key")
            # a file that exists keeps its permissions; a new one is its owner's
            mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
            with whole_file(target, mode) as new:
                new.write(text.encode())
    except OSError as error:
        raise KeyFileError(f"cannot write the key file {file}: {error.strerror}") from error
    return key
