"""`/v1/responses`: turns in the format of OpenAI's Responses, and the responses that are stored."""

from collections.abc import Iterable
from typing import Any

import msgspec

from proxy.dialects.responses.dialect import COMPACT_PATH, PATH, CompactDialect, ResponsesDialect
from proxy.dialects.responses.ids import input_item_id, is_response_id
from proxy.dialects.responses.items import listed
from proxy.dialects.responses.records import ResponseRecord, output_of, recall
from proxy.dialects.responses.request import read_request
from proxy.errors import BadRequest, EngineUnavailable, NotFound
from proxy.history.store import StoreError, session_id
from proxy.http import Request, Response, query_value
from proxy.routes.base import Route
from proxy.routes.large_bodies import parsed
from proxy.routes.scopes import KeyScope
from proxy.routes.store_route import StoreRoute, number
from proxy.routes.turns import serve_dialect
from proxy.turn.services import Services

_RENAMED = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""Names of fields of a chat completion to those of the request that it was made of."""
_LISTED_AT_MOST = 100


class Responses(Route):
    """Serves a turn; reads before it what the request names, and stores the response after it."""

    path = PATH
    summary = "Response, token-exact over turns"
    _compact = False
    _dialect: type[ResponsesDialect] = ResponsesDialect

    async def answer(self, request: Request, services: Services, /) -> Response:
        """A response of OpenAI's Responses, whole or as a stream of events."""
        asked = await parsed(request, services, lambda: read_request(request.body, compact=self._compact))
        stored = _Stored(request, services)
        dialect = self._dialect(asked, await recall(asked, stored.read), stored.keep)
        try:
            return await serve_dialect(dialect, request, services)
        except BadRequest as error:
            error.param = _RENAMED.get(error.param or "", error.param)
            raise


class CompactResponses(Responses):
    """Replaces a conversation by a summary of it, which the model writes in an ordinary turn."""

    path = COMPACT_PATH
    summary = "A summary in place of a conversation"
    _compact = True
    _dialect = CompactDialect


class _Stored:
    """The documents of one request's tenant."""

    def __init__(self, request: Request, services: Services) -> None:
        self._tenant = request.tenant
        self._history = services.history

    async def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """Those of these names that are stored. Raises EngineUnavailable if the store does not respond."""
        asked = {session_id(self._tenant, name): name for name in names}
        if not asked:
            return {}
        try:
            found = await self._history.store.documents.read(list(asked))
        except StoreError as error:
            raise EngineUnavailable(f"the store does not respond, try again later: {error}") from error
        return {asked[name]: content for name, content in found.items()}

    async def keep(self, name: str, content: bytes) -> bool:
        """Store a document; False after a failure, which is logged and counted."""
        try:
            await self._history.store.documents.keep(session_id(self._tenant, name), content)
        except StoreError as error:
            self._history.placer.report("a response is not stored", error)
            return False
        return True


class _StoredRoute(StoreRoute):
    """Base of the routes of one stored response."""

    def needed_scope(self, method: str, path: str) -> KeyScope | None:
        """See `Route.needed_scope`: who may sample may also read and delete what was sampled."""
        return KeyScope.INFERENCE

    async def _record(self, request: Request, services: Services) -> tuple[str, ResponseRecord]:
        """The id and the record of the response that a path names. Raises NotFound, StoreError."""
        name = _name(request)
        document = session_id(request.tenant, name)
        found = await services.history.store.documents.read([document])
        if document not in found:
            raise _unknown(name)
        return name, msgspec.json.decode(found[document], type=ResponseRecord)


class OneResponse(_StoredRoute):
    """Reads or deletes a stored response."""

    # vLLM's own template, letter for letter: a plugin's route replaces the one with an equal template
    path = "/v1/responses/{response_id}"
    methods = ("GET", "DELETE")
    summary = "A stored response"

    async def reply(self, request: Request, services: Services) -> tuple[int, object]:
        """GET: the response as its client got it. DELETE: `{"id", "object", "deleted"}`."""
        if request.method == "DELETE":
            name = _name(request)
            if not await services.history.store.documents.delete(session_id(request.tenant, name)):
                raise _unknown(name)
            return 200, {"id": name, "object": "response", "deleted": True}
        if query_value(request, "stream", "false") == "true":
            raise BadRequest("`stream` is not supported: a stored response is complete", param="stream")
        _, record = await self._record(request, services)
        return 200, record.response


class CancelResponse(_StoredRoute):
    """Refuses to cancel a response: only a response in the background can be cancelled."""

    path = "/v1/responses/{response_id}/cancel"
    summary = "Refused: no response runs in the background"

    async def reply(self, request: Request, services: Services) -> tuple[int, object]:
        """400 for every stored response."""
        await self._record(request, services)
        raise BadRequest(
            "Cannot cancel a synchronous response: close the connection of a response that still streams",
            param="background",
        )


class InputItems(_StoredRoute):
    """Lists the input of a stored response."""

    path = "/v1/responses/{response_id}/input_items"
    methods = ("GET",)
    summary = "The input items of a stored response"

    async def reply(self, request: Request, services: Services) -> tuple[int, object]:
        """`?limit=20&order=desc&after=ID`: the items of its request, and those of the responses before it."""
        limit = number("limit", query_value(request, "limit", "20"))
        if not 1 <= limit <= _LISTED_AT_MOST:
            raise BadRequest(f"`limit` must be between 1 and {_LISTED_AT_MOST}", param="limit")
        order = query_value(request, "order", "desc")
        if order not in ("asc", "desc"):
            raise BadRequest("`order` must be asc or desc", param="order")
        items = await self._items(request, services)
        if order == "desc":
            items.reverse()
        if after := query_value(request, "after", ""):
            places = [index for index, item in enumerate(items) if item["id"] == after]
            if not places:
                raise BadRequest(f"`after` names no item of this response: {after!r}", param="after")
            items = items[places[0] + 1 :]
        page = items[: int(limit)]
        return 200, {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }

    async def _items(self, request: Request, services: Services) -> list[dict[str, Any]]:
        """All input items, the first one first."""
        name, record = await self._record(request, services)
        before = await _Stored(request, services).read(record.chain)
        items: list[dict[str, Any]] = []
        for earlier in record.chain:
            if earlier in before:
                previous = msgspec.json.decode(before[earlier], type=ResponseRecord)
                items += _listed(earlier, previous)
                items += output_of(previous)
        return items + _listed(name, record)


def _listed(name: str, record: ResponseRecord) -> list[dict[str, Any]]:
    return [listed(item, input_item_id(name, index)) for index, item in enumerate(record.input)]


def _name(request: Request) -> str:
    """The id of the response in a path. Raises NotFound if there is no response with such an id."""
    name = request.path.partition("?")[0].split("/")[3]
    if not is_response_id(name):
        raise _unknown(name)
    return name


def _unknown(name: str) -> NotFound:
    return NotFound(
        f"Response with id '{name}' not found: never stored, deleted, or too old",
        param="response_id",
        code="response_not_found",
    )
