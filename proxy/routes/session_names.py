"""Reads the session of a request from a header or path, and the fields that the session sets."""

import re
from urllib.parse import unquote

import msgspec

from proxy.dialects.base import SessionFields
from proxy.errors import BadRequest
from proxy.history.store import StoreError, session_id
from proxy.http import Request
from proxy.turn.request import SessionRef
from proxy.turn.services import Services
from proxy.types import Fields

HEADER = b"x-session-id"
_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._~:@+=-]{1,200}")


def session_in_path(request: Request) -> str:
    """The session after `/v1/sessions/` in a path. Raises BadRequest."""
    name = request.path.partition("?")[0].split("/")[3]
    return check_name(unquote(name), "session")


def check_name(name: str, param: str) -> str:
    """The name. Raises BadRequest unless paths and headers can hold it unchanged."""
    if not _NAME.fullmatch(name):
        raise BadRequest(f"`{param}` must be 1 to 200 letters, digits or any of . _ ~ : @ + = -", param=param)
    return name


async def session_fields(request: Request, services: Services) -> SessionFields | None:
    """The session that a request names in its header, with the fields it sets; None if it names none.

    Raises:
        BadRequest: it is not a valid name of a session.
    """
    value = next((value for key, value in request.headers if key == HEADER), None)
    if value is None:
        return None
    name = check_name(value.decode("latin-1").strip(), "X-Session-ID")
    history = services.history
    try:
        session = await history.store.session(session_id(request.tenant, name))
    except StoreError as error:
        history.placer.report("a session's defaults and overrides do not apply", error)
        session = None
    if session is None:
        return SessionFields(SessionRef(name))
    return SessionFields(
        SessionRef(name, session.explicit),
        msgspec.json.decode(session.defaults, type=Fields),
        msgspec.json.decode(session.overrides, type=Fields),
    )
