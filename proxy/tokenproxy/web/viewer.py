"""`/viewer`: the page that shows recorded rollouts, and the data that it reads.

The page and its files hold no recorded data, and a browser cannot send a key with its first request: so they
are served without one, and the page asks for a key if the data needs it.
"""

import asyncio
import re
from collections.abc import Sequence

from chat_tokenizer import ChatTokenizer
from tokenproxy.base.errors import BadRequest, Forbidden, NotFound
from tokenproxy.base.http import JSON_HEADERS, BytesResponse, Request, Response, json_response
from tokenproxy.base.types import Headers
from tokenproxy.record.identity import recorded_with
from tokenproxy.record.session_rules import read_refusals
from tokenproxy.record.store import Session
from tokenproxy.record.turn import Turn
from tokenproxy.samples.tree import TurnTree, path_of
from tokenproxy.turn.services import Services
from tokenproxy.viewer.drift import Basis, drift_lane
from tokenproxy.viewer.folds import fold_table
from tokenproxy.viewer.page import PAGE, StaticFile, load_files
from tokenproxy.viewer.recording import RecordedSession
from tokenproxy.viewer.session_list import MOST_FOLDED, MOST_SEARCHED, Search, describe, list_sessions
from tokenproxy.viewer.summary import Summaries
from tokenproxy.viewer.tokens import encode_tokens
from tokenproxy.viewer.tree import session_tree
from tokenproxy.web.base import Route, SessionRoute, StoreRoute
from tokenproxy.web.parameters import Query, next_page

_PAGE_HEADERS: Headers = [
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]
_DATA_HEADERS: Headers = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
"""Of responses that hold recorded data."""
_JSON_DATA: Headers = [*_DATA_HEADERS, *JSON_HEADERS]
_LIST_PARAMETERS = ("search", "messages", "where", "fold", "limit", "before")


class _FileRoute(Route):
    """Base of the routes that need no key: the page must be able to ask for one."""

    is_public = False
    methods = ("GET", "HEAD")
    needs_tenant = False
    key_scope = None

    def __init__(self) -> None:
        self._files = load_files()


class ViewerPage(_FileRoute):
    """Serves the page."""

    path = "/viewer"
    summary = "The page that shows recorded rollouts"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """HTML. 401 without a key where one is needed (the page then asks for it), 403 without `read`."""
        if not request.may_read and request.tenant:
            raise Forbidden("the viewer needs an API key with the scope `read`", code="insufficient_scope")
        return _file_response(self._files[PAGE], request, 200 if request.may_read else 401)


class ViewerSlash(_FileRoute):
    """Redirects to the page: its links are relative, so that it works below any path."""

    path = "/viewer/"
    summary = "Redirects to /viewer"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """307."""
        return BytesResponse(307, [(b"location", b"../viewer")], b"")


class ViewerFile(_FileRoute):
    """Serves the modules and the style sheet of the page."""

    path = "/viewer/static/{file}"
    observed = False
    summary = "A static file of the page"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """One of the package's files; 404 for all other names."""
        file = self._files.get(request.parameters["file"])
        if file is None:
            raise NotFound("the viewer has no such file", param="file", code="file_not_found")
        return _file_response(file, request, 200)


class ViewerSessions(StoreRoute):
    """Lists the most recently used sessions."""

    path = "/viewer/sessions"
    is_public = False
    methods = ("GET",)
    store_seconds = 30.0
    summary = "The list of sessions with a search, or their folds by a key of the metadata, for the page"

    def __init__(self) -> None:
        self._summaries = Summaries()

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`?search=&messages=true&where=KEY=VALUE&limit=&before=`, or with `fold=KEY` in place of `limit`.

        See `tokenproxy.viewer.session_list` and `folds`. `reading` tells that summaries are missing which
        another request would find.
        """
        query = Query(request, _LIST_PARAMETERS, several=("where",))
        search = Search(query.text("search"), query.flag("messages"), tuple(query.values("where")))
        key, (limit, before) = query.text("fold"), query.page()
        size, most = (MOST_FOLDED, MOST_FOLDED) if key else (limit, MOST_SEARCHED)
        found, last = await list_sessions(services.store, request.tenant, search, before, size, most)
        summaries, reading = await self._summaries.read(services.store, found)
        following = next_page(last) if last is not None else None

        def page() -> Response:
            if key:
                shown = fold_table(found, summaries, key)
            else:
                described = (describe(each, each.rewards.get(""), summaries.get(each.id)) for each in found)
                shown = {"object": "list", "data": list(described)}
            return json_response({**shown, "next": following, "reading": reading}, headers=_JSON_DATA)

        return await asyncio.to_thread(page)


class ViewerDataRoute(SessionRoute):
    """Base of the routes that read one session. Their format is the page's own, and may change with it."""

    is_public = False
    store_seconds = 30.0


class ViewerSession(ViewerDataRoute):
    """Returns a session with its turns."""

    path = "/viewer/sessions/{session}"
    parameters = ("since", "used")
    summary = "A session's turns with their messages, for the page"

    async def show(self, query: Query, services: Services, found: RecordedSession) -> Response:
        """See `tokenproxy.viewer.tree`.

        `?since=` leaves out turns that were recorded before, in seconds. With `?used=`, the last use that the
        page has seen, there are no turns if the session was not used since.
        """
        since = query.number("since", "-inf")
        refusals = await read_refusals(services.store, found.session.id)
        return await asyncio.to_thread(
            lambda: json_response(
                {**session_tree(found.session, found.turns, found.rewards, since), "refusals": refusals},
                headers=_JSON_DATA,
            )
        )

    def needs_turns(self, query: Query, session: Session) -> bool:
        """See `SessionRoute.needs_turns`: an open page asks every two seconds."""
        return query.number("used", "-inf") != session.used


class ViewerTokens(ViewerDataRoute):
    """Returns the ids of the path to a turn."""

    path = "/viewer/sessions/{session}/tokens"
    parameters = ("turn",)
    summary = "The ids of the path to a turn, in binary, for the page"

    async def show(self, query: Query, services: Services, found: RecordedSession) -> Response:
        """`?turn=ID`. See `tokenproxy.viewer.tokens`."""
        path = _path(query, found.turns)
        tokenizer, note = _tokenizer(services, path[-1])
        body = await asyncio.to_thread(lambda: encode_tokens(path, TurnTree(found.turns), tokenizer, note))
        return BytesResponse(200, [*_DATA_HEADERS, (b"content-type", b"application/octet-stream")], body)


class ViewerDrift(ViewerDataRoute):
    """Compares the prompt of a turn with what it would have been without the record."""

    path = "/viewer/sessions/{session}/drift"
    parameters = ("turn", "basis")
    summary = "Where the prompt of a turn differs from the template's own rendering, for the page"

    async def show(self, query: Query, services: Services, found: RecordedSession) -> Response:
        """`?turn=ID&basis=template|before`. See `tokenproxy.viewer.drift`."""
        path, chosen = _path(query, found.turns), query.text("basis")
        if chosen not in ("", *Basis):
            raise BadRequest.of("basis", f"must be one of {', '.join(Basis)}")
        tokenizer, note = _tokenizer(services, path[-1])

        def compare() -> Response:
            return json_response(drift_lane(found.turns, path, chosen, tokenizer, note), headers=_JSON_DATA)

        return await asyncio.to_thread(compare)


def _path(query: Query, turns: Sequence[Turn]) -> list[Turn]:
    """The path to the turn in the query. Raises BadRequest."""
    by_id = {turn.id: turn for turn in turns}
    name = query.text("turn")
    if name not in by_id:
        raise BadRequest(f"the session has no turn {name!r}", param="turn")
    return path_of(by_id[name], by_id)


def _tokenizer(services: Services, turn: Turn) -> tuple[ChatTokenizer | None, str]:
    """The tokenizer of the fleet, and why there is none or why its texts may be wrong for this turn."""
    model = services.fleet.model
    if model is None or model.tokenizer is None:
        problem = model.tokenizer_problem if model is not None else "no engine responds"
        return None, f"the tokenizer is not there: {problem}"
    if recorded_with(turn, model.tokenizer.fingerprint):
        return model.tokenizer, ""
    return model.tokenizer, "recorded with another tokenizer or chat template: texts may be wrong"


def _file_response(file: StaticFile, request: Request, status: int) -> Response:
    headers = [*_PAGE_HEADERS, (b"content-type", file.media_type.encode()), (b"etag", file.etag.encode())]
    sent = next((value for name, value in request.headers if name == b"if-none-match"), b"")
    held = [tag.removeprefix(b"W/") for tag in re.split(rb"[\s,]+", sent)]
    if status == 200 and (b"*" in held or file.etag.encode() in held):
        return BytesResponse(304, headers, b"")
    return BytesResponse(status, headers, file.content)
