"""URLs of engines: those of settings, of a file, and of the admin API."""

import re
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path

from yarl import URL

PORT = 8100
"""Where clients reach a proxy, in front of vLLM or inside it, unless it is told another port."""
LOCAL_URL = f"http://127.0.0.1:{PORT}"
DNS_SCHEME = "dns+http"
"""`dns+http://NAME:PORT` stands for one engine at each address of NAME."""
ACTOR_SCHEME = "ray-actor"
"""`ray-actor://NAME` stands for one engine at each Ray actor of NAME; only Ray Serve has them."""
_NAME_SCHEMES = (DNS_SCHEME, ACTOR_SCHEME)
_ACTORS = re.compile(r"[\w.:#@-]+(/[A-Za-z_]\w*)?")


class UpstreamsError(ValueError):
    """A list of engines cannot be read; the message says why."""


def normalise_base_url(url: str) -> str:
    """The server's root URL: `http://host:8000`, `http://host:8000/` and `/v1/` all give `http://host:8000`.

    Raises:
        ValueError: `url` is not an http or https URL, or its host cannot be a name.
    """
    url = url.strip()
    try:
        parsed = URL(url)
        # as each connection does: a label is not empty, and has at most 63 characters
        (parsed.raw_host or "").encode("idna")
        # yarl drops line ends and tabs, so that another host is left
        plain = bool(parsed.host) and url.isprintable() and " " not in url
        usable = parsed.scheme in ("http", "https") and plain
    except ValueError:
        usable = False
    if not usable:
        # the part before an @ may hold a password
        shown = url.rpartition("@")[2]
        raise ValueError(f"{shown!r} is not an http(s) URL: use one like http://127.0.0.1:8000")
    root = str(parsed.with_query(None).with_fragment(None)).rstrip("/")
    return root.removesuffix("/v1").rstrip("/")


def url_credentials(url: str) -> str | None:
    """The Authorization header for the user and password in a URL; None if it has none."""
    parsed = URL(url)
    if parsed.user is None and parsed.password is None:
        return None
    pair = f"{parsed.user or ''}:{parsed.password or ''}"
    return f"Basic {b64encode(pair.encode()).decode()}"


def without_credentials(url: str) -> str:
    """A URL without user and password, for logs and errors."""
    return str(URL(url).with_user(None))


def read_upstreams(file: Path) -> list[str]:
    """The URLs of a file, normalised.

    Raises:
        UpstreamsError: it cannot be read, or a line is no URL.
    """
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UpstreamsError(f"cannot read {file}: {error}") from error
    try:
        urls = list(_urls(lines))
    except ValueError as error:
        raise UpstreamsError(f"{file}: {error}") from error
    if not urls:
        raise UpstreamsError(f"{file} names no engine")  # it may be read while it is written
    return urls


def _urls(lines: Iterable[str]) -> Iterable[str]:
    for line in lines:
        if url := line.partition("#")[0].strip():
            yield normalise_upstream(url)


def normalise_upstream(url: str) -> str:
    """The root URL of an engine, or a URL that stands for a name.

    Raises:
        ValueError: it is neither.
    """
    scheme = _scheme(url)
    if scheme == ACTOR_SCHEME:
        return _normalise_actors(url)
    if scheme == DNS_SCHEME:
        return f"{DNS_SCHEME}{normalise_base_url('http' + url[len(DNS_SCHEME) :])[len('http') :]}"
    return normalise_base_url(url)


def _normalise_actors(url: str) -> str:
    name = url[len(f"{ACTOR_SCHEME}://") :]
    if not _ACTORS.fullmatch(name):
        raise ValueError(
            f"{url!r} names no actors: write {ACTOR_SCHEME}://NAME or {ACTOR_SCHEME}://NAME/METHOD"
        )
    return url


def names_engines(url: str) -> bool:
    """Whether a URL stands for a name, which is to be resolved."""
    return _scheme(url) in _NAME_SCHEMES


def _scheme(url: str) -> str:
    return url.partition("://")[0]
