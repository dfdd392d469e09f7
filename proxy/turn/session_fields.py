"""Which session a request belongs to, and what that session wants of its requests."""

import re
from urllib.parse import unquote

import msgspec

from proxy.errors import BadRequest
from proxy.fields import given
from proxy.history.store import StoreError
from proxy.http import Request
from proxy.turn.services import Services
from proxy.types import Fields, Headers

HEADER = b"x-session-id"
_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._~:@+=-]{1,200}")


def session_of(headers: Headers) -> str | None:
    """The session a request names in its header, or None.

    Raises:
        BadRequest: it is no name for a session.
    """
    value = next((value for name, value in headers if name == HEADER), None)
    return None if value is None else check_name(value.decode("latin-1").strip(), "X-Session-ID")


def session_in_path(incoming: Request) -> str:
    """The session that stands behind `/v1/sessions/` in a path. Raises BadRequest."""
    name = incoming.path.partition("?")[0].split("/")[3]
    return check_name(unquote(name), "session")


def check_name(name: str, param: str) -> str:
    """The name. Raises BadRequest unless it can stand in a path and a header as it is."""
    if not _NAME.fullmatch(name):
        raise BadRequest(f"`{param}` must be 1 to 200 letters, digits or any of . _ ~ : @ + = -", param=param)
    return name


async def apply_session(fields: Fields, session: str, gateway: Services) -> None:
    """Fill in the session's defaults where the request is silent, and its overrides whatever it says."""
    try:
        found = await gateway.rollouts.store.session(session)
    except StoreError as error:
        gateway.rollouts.complain("a session's sampling defaults do not apply", error)
        return
    if found is None:
        return
    for name, value in msgspec.json.decode(found.defaults, type=Fields).items():
        if given(fields, name) is None:
            fields[name] = value
    fields.update(msgspec.json.decode(found.overrides, type=Fields))
