"""The static files of the page: plain ES modules, one style sheet, one HTML file. Nothing is built."""

from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "static"
PAGE = "index.html"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class StaticFile(NamedTuple):
    """One file, as it is served."""

    content: bytes
    media_type: str
    etag: str
    """With its quotes."""


def load_files() -> dict[str, StaticFile]:
    """All files by their names."""
    return {path.name: _load(path) for path in sorted(FOLDER.iterdir()) if path.suffix in _TYPES}


def _load(path: Path) -> StaticFile:
    content = path.read_bytes()
    return StaticFile(content, _TYPES[path.suffix], f'"{blake2b(content, digest_size=12).hexdigest()}"')
