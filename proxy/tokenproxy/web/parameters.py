"""Reads what a request names: its session with the fields that it sets, and the parameters in its query.

The first of these names the session:

    1. `X-Session-ID`, which the base URL `/sessions/ID` sets too
    2. the client's API key, if `session_from_key` is set and nothing checks the key
    3. the headers of `PROGRAM_HEADERS`, with which coding agents name their own sessions

All of them name explicit sessions of the request's tenant.
"""

import re
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from urllib.parse import parse_qsl

import msgspec
from msgspec.structs import replace

from tokenproxy.base.errors import BadRequest, NotFound
from tokenproxy.base.fields import read
from tokenproxy.base.http import Request
from tokenproxy.base.request import SessionRef
from tokenproxy.base.types import Fields
from tokenproxy.formats.base import NamedSession
from tokenproxy.record.session_rules import SessionLimits
from tokenproxy.record.store import Session, StoreError, session_id
from tokenproxy.samples.layouts import LAYOUTS, Layout
from tokenproxy.samples.samples import SHARED, Selection
from tokenproxy.turn.services import Services
from tokenproxy.web.credentials import key_in, tenant_of_key

HEADER = b"x-session-id"
PROGRAM_HEADERS = (
    b"x-claude-code-session-id",
    b"session-id",  # Codex
    b"x-session-affinity",  # OpenCode
)
"""The headers of programs, in their order. A value that is no valid name is replaced by its digest."""
KEY_PREFIX = "session-"
"""A key that begins with this, and is a valid name, is the name itself, as the ids that `POST /v1/sessions`
makes. Of every other key the name holds a digest, because names are shown and keys are secrets."""

_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._~:@+=-]{1,200}")


def session_in_path(request: Request) -> str:
    """The session in the path of a route. Raises BadRequest."""
    return check_name(request.parameters["session"], "session")


def unknown_session(name: str) -> NotFound:
    """The error for a session that the store does not hold."""
    return NotFound(
        f"unknown session {name!r}: never used, deleted, or evicted",
        param="session",
        code="session_not_found",
    )


def check_name(name: str, param: str) -> str:
    """The name, a slash in it as `=2F`. Raises BadRequest unless paths and headers can hold it unchanged."""
    name = name.replace("/", "=2F")
    if not _NAME.fullmatch(name):
        raise BadRequest.of(param, "must be 1 to 200 letters, digits or any of . _ ~ : @ + = -")
    return name


def session_name(request: Request, *, from_key: bool) -> str | None:
    """The session that a request names; None if it names none.

    Args:
        from_key: the setting `session_from_key`.

    Raises:
        BadRequest: `X-Session-ID` is not a valid name of a session.
    """
    sent = dict(reversed(request.headers))  # of repeated headers the first counts
    if HEADER in sent:
        return check_name(sent[HEADER].decode("latin-1").strip(), "X-Session-ID")
    if from_key and (key := _unchecked_key(request)):
        return _name_of_key(key)
    for program_header in PROGRAM_HEADERS:
        if value := sent.get(program_header, b"").strip():
            name = value.decode("latin-1")
            return name if _NAME.fullmatch(name) else _digest(value)
    return None


def _unchecked_key(request: Request) -> bytes:
    """The first key of a request that neither the proxy nor the engine checked; empty if there is none.

    The keys of the proxy are removed from the headers once they are checked. A key that the engine checked is
    the tenant's. Both are shared by many sessions.
    """
    keys = (key_in(*pair) for pair in request.headers)
    return next((key for key in keys if key and tenant_of_key(key) != request.tenant), b"")


def _name_of_key(key: bytes) -> str:
    text = key.decode("latin-1")
    return text if text.startswith(KEY_PREFIX) and _NAME.fullmatch(text) else f"key-{_digest(key)}"


def _digest(value: bytes) -> str:
    """32 hexadecimal digits, other than those of a tenant."""
    return blake2b(value, digest_size=16, person=b"session").hexdigest()


async def named_session(request: Request, services: Services) -> NamedSession | None:
    """The session that a request names, with the fields it sets; None if it names none.

    Raises:
        BadRequest: it is not a valid name of a session.
        StoreError: its limits cannot be read, nor were before, and its client's key takes turns alone.
    """
    name = session_name(request, from_key=services.settings.session_from_key)
    if name is None:
        return None
    history = services.history
    try:
        session = await history.store.session(session_id(request.tenant, name))
        if request.turns_only and session is not None:
            services.last_sessions.put(session.id, session)
    except StoreError as error:
        if not request.turns_only:
            error.report(history.metrics, "a session's description does not apply")
            return NamedSession(SessionRef(name))
        session = services.last_sessions.get(session_id(request.tenant, name))
        if session is None:
            raise
        # what was recorded since is not known: each request counts as a turn
        session = replace(session, turns=session.turns + 1)
        services.last_sessions.put(session.id, session)
    if session is None:
        return NamedSession(SessionRef(name))
    try:
        defaults, overrides, policy = (
            msgspec.json.decode(each, type=Fields)
            for each in (session.defaults, session.overrides, session.policy)
        )
        limit = msgspec.json.decode(session.limits, type=SessionLimits).reached(session, time.time())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(
            f"the description of the session {name!r} is damaged in the store: save defaults, overrides, "
            "limits and policy again with POST /v1/sessions",
            param="session",
        ) from error
    noted = read(policy, "mode", str) == "note"
    policy.pop("mode", None)
    if not noted:
        overrides, policy = overrides | policy, {}
    finished = session.position > 0
    return NamedSession(SessionRef(name, session.explicit), defaults, overrides, policy, limit, finished)


_NUMBER = re.compile(r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|inf)", re.IGNORECASE)
"""`float` also takes NaN, digits of other scripts, spaces around them and underscores between them."""
_MOST_LISTED = 1000


class Query:
    """The parameters in the query of a request. Those that are empty count as missing."""

    def __init__(self, request: Request, known: Collection[str], several: Collection[str] = ()) -> None:
        """Refuse names that the route does not have: a filter that is not understood must not be ignored.

        Args:
            several: parameters that may be repeated.

        Raises:
            BadRequest: as all other methods.
        """
        self.request = request
        self._values: dict[str, list[str]] = {}
        for name, value in parse_qsl(request.path.partition("?")[2], keep_blank_values=True):
            if name not in known:
                problem = f"it has {', '.join(known)}" if known else "it has none"
                raise BadRequest.of(name, f"is no parameter of this route: {problem}")
            if name in self._values and name not in several:
                raise BadRequest.of(name, "must not be repeated")
            self._values.setdefault(name, []).append(value)

    def empty(self) -> Iterator[str]:
        """Yield the names of parameters without a value."""
        return (name for name, values in self._values.items() if "" in values)

    def values(self, name: str) -> list[str]:
        """All values of a parameter."""
        return list(filter(None, self._values.get(name, ())))

    def text(self, name: str, default: str = "") -> str:
        """The last value of a parameter."""
        return [default, *self.values(name)][-1]

    def number(self, name: str, default: str) -> float:
        """The number that a parameter holds; `inf` and `-inf` are numbers."""
        text = self.text(name, default)
        if not _NUMBER.fullmatch(text):
            raise BadRequest.of(name, "must be a number")
        return float(text)

    def limit(self, default: int, most: int) -> int:
        """The parameter `limit`."""
        limit = self.number("limit", str(default))
        if not 1 <= limit <= most or limit % 1:
            raise BadRequest.of("limit", f"must be a whole number between 1 and {most}")
        return int(limit)

    def page(self) -> tuple[int, float]:
        """The parameters `limit` and `before`, which is the field `next` or a time."""
        return self.limit(100, _MOST_LISTED), self.number("before", "inf")

    def flag(self, name: str) -> bool:
        """A parameter that is `true` or `false`; false if it is missing."""
        value = self.text(name, "false")
        if value not in ("true", "false"):
            raise BadRequest.of(name, "must be true or false")
        return value == "true"

    def selection(self) -> Selection:
        """The parameters `shared`, `class` and `on_policy`."""
        shared = self.text("shared", "once")
        if shared not in SHARED:
            raise BadRequest.of("shared", "must be `once` or `each`")
        return Selection(SHARED[shared], frozenset(self.values("class")), self.flag("on_policy"))

    def layout(self) -> Layout:
        """The parameter `layout`."""
        layout = self.text("layout", "plain")
        if layout not in LAYOUTS:
            raise BadRequest.of("layout", f"must be one of {', '.join(LAYOUTS)}")
        return LAYOUTS[layout]


def next_page(last: Session) -> str:
    """The `before` of the page after a session."""
    return repr(last.used)


@contextmanager
def refused_as(param: str, message: str = "") -> Iterator[None]:
    """Turn a ValueError about a parameter into a BadRequest; without `message`, with its own message."""
    try:
        yield
    except ValueError as error:
        raise BadRequest(message or str(error), param=param) from error
