"""Where to look at the rollouts of the demo: the viewer of a running server, or a file with its page."""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from proxy.view_command import ViewError, page_from_server
from proxy.viewer.page import single_file

FILE_NAME = "demo-rollouts.html"


def viewer_address(url: str) -> str:
    """The address of the viewer of a server."""
    return f"{url}/viewer"


def compare_address(page: str, sessions: Sequence[str]) -> str:
    """The address of a page that shows sessions side by side."""
    return f"{page}#/compare/{'/'.join(f'{quote(session)}/-' for session in sessions)}"


def write_page(url: str, api_key: str, sessions: Sequence[str], folder: Path) -> str:
    """Write a page with sessions of a running server; returns the address of the file.

    Raises:
        ViewError: the server does not show them.
        OSError: the file cannot be written.
    """
    page = page_from_server(url, api_key, sessions)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FILE_NAME
    file.write_text(single_file(page))
    return file.resolve().as_uri()


__all__ = ["ViewError", "compare_address", "viewer_address", "write_page"]
