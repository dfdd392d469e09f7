"""`/v1/responses`: turns in the format of OpenAI's Responses, and the responses that are stored."""

from collections.abc import Iterable

import msgspec

from tokenproxy.base.errors import BadRequest, NotFound
from tokenproxy.base.http import Request, Response, json_response, query_value
from tokenproxy.base.types import Fields
from tokenproxy.formats.responses.format import COMPACT_PATH, PATH, ResponsesFormat
from tokenproxy.formats.responses.items import is_response_id
from tokenproxy.formats.responses.records import ResponseRecord, recall
from tokenproxy.formats.responses.request import read_request
from tokenproxy.record.store import DOCUMENTS, StoreError, session_id
from tokenproxy.turn.services import Services
from tokenproxy.web.base import Route, StoreRoute, parsed
from tokenproxy.web.keys import KeyScope
from tokenproxy.web.turns import serve_format

_RENAMED = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""Names of fields of a chat completion to those of the request that it was made of."""
_OUTLINE = msgspec.json.Decoder(Fields)


class Responses(Route):
    """Serves a turn; reads before it what the request names, and stores the response after it."""

    path = PATH
    summary = "Response, token-exact over turns"
    _compact = False

    async def answer(self, request: Request, services: Services, /) -> Response:
        """A response of OpenAI's Responses, whole or as a stream of events."""
        asked = await parsed(request, services, lambda: read_request(request.body, compact=self._compact))
        stored = _Stored(request, services)
        wire_format = ResponsesFormat(asked, await recall(asked, stored.read), stored.keep)
        try:
            return await serve_format(wire_format, request, services)
        except BadRequest as error:
            error.param = _RENAMED.get(error.param or "", error.param)
            raise


class CompactResponses(Responses):
    """Replaces a conversation by a summary of it, which the model writes in an ordinary turn."""

    path = COMPACT_PATH
    summary = "A summary in place of a conversation"
    _compact = True


class _Stored:
    """The documents of one request's tenant."""

    def __init__(self, request: Request, services: Services) -> None:
        self._tenant = request.tenant
        self._history = services.history

    async def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """Those of these names that are stored, and can be read. Raises StoreError."""
        asked = {session_id(self._tenant, name): name for name in names}
        if not asked:
            return {}
        store = self._history.store
        found = await store.get(DOCUMENTS, list(asked))
        read = store.unreadable.read  # a document is decoded later: here only its outline is checked
        return {
            asked[name]: content
            for name, content in found.items()
            if read(f"{DOCUMENTS} {name}", _OUTLINE.decode, content) is not None
        }

    async def keep(self, name: str, content: bytes) -> bool:
        """Store a document; False if that comes later, or after a failure, which is logged and counted."""
        try:
            store, document = self._history.store, session_id(self._tenant, name)
            keep_s = store.limits.max_age_s
            return await store.put(DOCUMENTS, document, content, keep_s=keep_s, before=None)
        except StoreError as error:
            error.report(self._history.metrics, "a response is not stored")
            return False


class OneResponse(StoreRoute):
    """Reads or deletes a stored response."""

    # vLLM's own template, letter for letter: a plugin's route replaces the one with an equal template
    path = "/v1/responses/{response_id}"
    methods = ("GET", "DELETE")
    summary = "A stored response"

    def needed_scope(self, method: str, path: str) -> KeyScope | None:
        """See `Route.needed_scope`: who may sample may also read and delete what was sampled."""
        return KeyScope.INFERENCE

    async def answer(self, request: Request, services: Services, /) -> Response:
        """GET: the response as its client got it. DELETE: `{"id", "object", "deleted"}`."""
        name = _name(request)
        if request.method == "DELETE":
            if not await services.store.put(DOCUMENTS, session_id(request.tenant, name), None):
                raise _unknown(name)
            return json_response({"id": name, "object": "response", "deleted": True})
        if query_value(request, "stream", "false") == "true":
            raise BadRequest("`stream` is not supported: a stored response is complete", param="stream")
        found = await _Stored(request, services).read([name])
        if name not in found:
            raise _unknown(name)
        return json_response(msgspec.json.decode(found[name], type=ResponseRecord).response)


def _name(request: Request) -> str:
    """The id of the response in a path. Raises NotFound if there is no response with such an id."""
    name = request.parameters["response_id"]
    if not is_response_id(name):
        raise _unknown(name)
    return name


def _unknown(name: str) -> NotFound:
    return NotFound(
        f"Response with id '{name}' not found: never stored, deleted, or too old",
        param="response_id",
        code="response_not_found",
    )
