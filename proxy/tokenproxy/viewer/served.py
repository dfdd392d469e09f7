"""Reads sessions from a running proxy, by the routes that its own page reads."""

from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from tokenproxy.base.urls import normalise_base_url
from tokenproxy.engine.protocol import error_text
from tokenproxy.viewer.recording import Leaf, PageData

_HINTS = {401: ": pass --api-key KEY", 404: ": is this a proxy, and the session one of its?"}


class ViewError(Exception):
    """The page could not be written; the message says why."""


def page_from_server(url: str, api_key: str | None, names: Iterable[str]) -> PageData:
    """The data of sessions of a running proxy; the texts of the ids are those of its tokenizer.

    Raises:
        ViewError: it does not respond, or does not have a session.
        ValueError: `url` is not a URL.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    page = PageData()
    base_url = normalise_base_url(url)
    with httpx.Client(base_url=base_url, headers=headers, timeout=120.0, trust_env=False) as client:
        for name in names:
            tree = msgspec.json.decode(_get(client, f"/viewer/sessions/{quote(name)}"))
            page.add(name, tree, {leaf: _leaf(client, quote(name), leaf) for leaf in _leaves(tree)})
    page.fold()
    return page


def _leaf(client: httpx.Client, name: str, leaf: str) -> Leaf:
    path = f"/viewer/sessions/{name}"
    lanes = [msgspec.json.decode(_get(client, f"{path}/drift?turn={leaf}"))]
    if lanes[0]["basis"] != "template":
        lanes.append(msgspec.json.decode(_get(client, f"{path}/drift?turn={leaf}&basis=template")))
    return _get(client, f"{path}/tokens?turn={leaf}"), lanes


def _leaves(tree: dict[str, Any]) -> Iterator[str]:
    continued = {turn["parent"] for turn in tree["turns"]}
    return (turn["id"] for turn in tree["turns"] if turn["break"] or turn["id"] not in continued)


def _get(client: httpx.Client, path: str) -> bytes:
    """The body of a route of the viewer. Raises ViewError."""
    try:
        response = client.get(path)
    except httpx.HTTPError as error:
        raise ViewError(f"no proxy responds at {client.base_url}: {error}") from error
    if response.status_code != 200:
        status, text = response.status_code, error_text(response.content)
        raise ViewError(f"{client.base_url} answered {status} to {path}: {text}{_HINTS.get(status, '')}")
    return response.content
