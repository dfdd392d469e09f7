"""API keys: their scopes, and the file that holds several, which is read again when it changes.

A route of the engine that is on no list needs the scope `admin`. So a development route that a new version of
vLLM adds needs `admin` by default.

The file holds SHA-256 digests. A key has 256 random bits, so guessing it is infeasible even with a fast
digest: a password hash (scrypt, argon2) would cost each request milliseconds without a gain. A key begins
with its id, which is hashed too, like a salt; a request is compared only with the digest of that id.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from tokenproxy.base.errors import UsageError
from tokenproxy.record.session_keys import SessionKey
from tokenproxy.web.credentials import SINGLE_TENANT, tenant_of_key

SCOPES_KEY = "tokenproxy.scopes"
"""Key of the ASGI scope with the scopes of a request's client."""
SESSION_KEY = "tokenproxy.session"
"""Key of the ASGI scope with the `SessionKey` of a request whose API key is for one session."""


class KeyScope(StrEnum):
    """The rights of a key. `inference` includes `turns`; no other scope includes another."""

    TURNS = "turns"
    """Turns, counting and tokenising, stored responses, the list of models; as the key of one session."""
    INFERENCE = "inference"
    """The engine's other inference routes; creating, rewarding and deleting the tenant's sessions."""
    READ = "read"
    """Sessions, the viewer's data, samples, the details of `/ready`, metrics."""
    ADMIN = "admin"
    """The routes under `/admin/`, and every route of the engine that is on no list here."""


EVERY_SCOPE = frozenset(KeyScope)
WITHOUT_ADMIN = EVERY_SCOPE - {KeyScope.ADMIN}

_INFERENCE = (
    "/v1/audio",
    "/v1/chat",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/rerank",
    "/v1/responses",
    "/v1/score",
    "/v1/systemone",
    "/v2/embed",
    "/v2/rerank",
    "/classify",
    "/cohere/v2/chat",
    "/detokenize",
    "/generative_scoring",
    "/inference/v1/generate",
    "/invocations",
    "/pooling",
    "/rerank",
    "/score",
    "/tokenize",
    "/tokenizer_info",
)
"""Routes of vLLM that change nothing in it; the paths below them too."""
_READ = ("/load", "/ping", "/version")
_SAMPLE_NOTHING = (
    "/v1/audio",
    "/v1/chat/completions/derender",
    "/v1/chat/completions/render",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/embeddings",
    "/v1/messages/render",
    "/v1/rerank",
    "/v1/responses/render",
    "/v1/score",
    "/v2/embed",
    "/v2/rerank",
    "/classify",
    "/cohere/v2/chat/render",
    "/detokenize",
    "/generative_scoring",
    "/pooling",
    "/rerank",
    "/score",
    "/tokenizer_info",
)
"""Of the inference routes that the proxy does not serve itself, those that sample no turn."""


def scope_of_engine_route(path: str) -> KeyScope:
    """The scope that a request for a route of the engine needs.

    Args:
        path: the engine's path, percent-decoded once, without the query.
    """
    if path == "/" or _is_below(path, ("/v1/models",)):  # Claude Code sends HEAD / when it starts
        return KeyScope.TURNS
    if _is_below(path, _INFERENCE):
        return KeyScope.INFERENCE
    return KeyScope.READ if _is_below(path, _READ) else KeyScope.ADMIN


def samples_unrecorded(path: str) -> bool:
    """Whether a POST to an inference route of the engine may sample what the proxy does not record.

    Limits and policies of sessions do not hold there either. `path` as in `scope_of_engine_route`.
    """
    return not _is_below(path, _SAMPLE_NOTHING)


def _is_below(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)


log = logging.getLogger("tokenproxy")

CHECK_S = 1.0
"""Seconds between two checks of the file."""

_NAME = "[A-Za-z0-9._~@+-]{1,100}"
_Name = Annotated[str, msgspec.Meta(pattern=rf"^{_NAME}\Z")]
_Tenant = Annotated[str, msgspec.Meta(pattern=rf"^({_NAME})?\Z")]
_FORMAT = "a list of keys, each with `name`, `id`, `sha256` and `scopes`; `tokenproxy key` writes one"


class KeyFileError(UsageError, ValueError):
    """A key file cannot be used; the message names the file and what is wrong with it."""


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key of the file."""

    name: _Name
    id: Annotated[str, msgspec.Meta(pattern=r"^tp-[0-9a-f]{8}$")]
    """The beginning of the key. It is not secret."""
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    """Digest of the whole key, in hexadecimal."""
    scopes: Annotated[list[KeyScope], msgspec.Meta(min_length=1)]
    tenant: _Tenant | None = None
    """The tenant whose recordings the key reaches; by default its name. So a key and its successor of the
    same name are one tenant, and so are keys of different names that share a `tenant`. Empty for what was
    recorded without a key."""
    created: date | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The rights of a verified key."""

    tenant: str
    scopes: frozenset[KeyScope]
    session: SessionKey | None = None
    """What it grants if it is for one session; None for all of the tenant."""


def with_included(scopes: Collection[KeyScope]) -> frozenset[KeyScope]:
    """Scopes with those that they include."""
    return frozenset(scopes) | ({KeyScope.TURNS} if KeyScope.INFERENCE in scopes else set())


def new_key(
    name: str, scopes: list[KeyScope], tenant: str | None = None, created: date | None = None
) -> tuple[str, KeyEntry]:
    """Create a key and its entry for the file.

    Raises:
        KeyFileError: the name or tenant is not 1 to 100 letters, digits or . _ ~ @ + -
    """
    for field, value in (("name", name), ("tenant", tenant or name)):
        if not re.fullmatch(_NAME, value):
            raise KeyFileError(f"the {field} of a key must be 1 to 100 letters, digits or . _ ~ @ + -")
    identity = f"tp-{secrets.token_hex(4)}"
    key = f"{identity}-{secrets.token_hex(32)}"
    return key, KeyEntry(name, identity, sha256(key.encode()).hexdigest(), scopes, tenant, created)


def as_yaml(entry: KeyEntry) -> str:
    """An entry as text to append to the file."""
    return yaml.safe_dump([msgspec.to_builtins(entry)], sort_keys=False)


def parse_keys(text: str, source: str) -> list[KeyEntry]:
    """The keys in the text of a file; none for `[]`.

    Raises:
        KeyFileError: it is empty, as a file is while an editor writes it, or holds anything but keys.
    """
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        # without the lines that YAML's message quotes
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise KeyFileError(f"{source} is not YAML{where}: it must hold {_FORMAT}") from error
    if content is None:
        raise KeyFileError(f"{source} is empty: it must hold {_FORMAT}, or [] for no keys")
    try:
        entries = msgspec.convert(content, list[KeyEntry])
    except msgspec.ValidationError as error:
        raise KeyFileError(f"{source}: {error}: it must hold {_FORMAT}") from error
    if len({entry.id for entry in entries}) < len(entries):
        raise KeyFileError(f"{source} holds two keys with one `id`: delete one of them")
    return entries


def read_keys(path: Path) -> list[KeyEntry]:
    """The keys of a file. Raises KeyFileError."""
    try:
        text = path.read_text()
    except OSError as error:
        raise KeyFileError(f"cannot read the key file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KeyFileError(f"the key file {path} is not UTF-8 text") from error
    return parse_keys(text, f"the key file {path}")


class KeyFile:
    """The keys of a file at the last time that it was valid."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises KeyFileError."""
        self._path = path
        self._stamp = self._seen = _stamp(path)
        self._keys: Mapping[str, tuple[bytes, ApiKey]] = {}
        self._use(read_keys(path))

    def find(self, key: bytes) -> ApiKey | None:
        """The tenant and scopes of a key; None if the file does not hold it."""
        identity, _, _ = key.rpartition(b"-")
        found = self._keys.get(identity.decode("latin-1"))
        if found is None or not secrets.compare_digest(sha256(key).digest(), found[0]):
            return None
        return found[1]

    def reload_if_changed(self) -> None:
        """Read the file again if it changed. If it cannot be used, keep the keys and log why.

        A file that is written in place may be cut between two entries, which looks whole: it is read once it
        did not change from one call to the next. A file that replaced it is whole.
        """
        stamp, seen = _stamp(self._path), self._seen
        self._seen = stamp
        if stamp == self._stamp or (stamp != seen and stamp[-1:] == self._stamp[-1:]):
            return
        self._stamp = stamp
        try:
            entries = read_keys(self._path)
        except KeyFileError as error:
            log.error("%s. The keys that were read before stay valid", error)
            return
        self._use(entries)
        log.info("%s changed: it holds %d keys", self._path, len(entries))

    async def watch(self) -> None:
        """Check the file in a second."""
        await asyncio.sleep(CHECK_S)
        # on a thread: a network file system may be slow
        await asyncio.to_thread(self.reload_if_changed)

    def _use(self, entries: list[KeyEntry]) -> None:
        self._keys = {
            entry.id: (
                bytes.fromhex(entry.sha256),
                ApiKey(
                    _tenant(entry.name if entry.tenant is None else entry.tenant),
                    with_included(entry.scopes),
                ),
            )
            for entry in entries
        }


def _tenant(name: str) -> str:
    """The tenant of a named key. No header can hold a NUL, so it differs from those of plain keys."""
    return tenant_of_key(b"name\0" + name.encode()) if name else SINGLE_TENANT


def _stamp(path: Path) -> tuple[int, ...]:
    """A value that changes when the file does, with its inode at the end; empty if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
