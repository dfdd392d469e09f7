"""`/viewer/sessions`: the list of sessions, with filters that no store has an index for."""

import math
from typing import ClassVar

from proxy.errors import BadRequest
from proxy.http import JSON_HEADERS, Request, query_value, query_values
from proxy.routes.parameters import check_parameters
from proxy.routes.store_route import StoreRoute, number
from proxy.routes.viewer import DATA_HEADERS
from proxy.samples.feed import metadata_condition
from proxy.turn.services import Services
from proxy.types import Headers
from proxy.viewer.session_query import ListQuery, Sort

_TEXTS = {
    "search": "search",
    "model": "model",
    "reason": "reason",
    "problem": "problem",
    "class": "request_class",
    "weight_version": "weight_version",
}
"""Parameters that are texts, with their names in `ListQuery`."""
_PARAMETERS = (
    *_TEXTS,
    *("metadata", "reward_min", "reward_max", "rewarded", "drift", "sort", "order", "offset", "limit"),
)
_MOST_ROWS = 500
_MOST_DIGITS = 12
"""Of whole numbers: Python refuses to read very long ones."""
_TRUTH = {"true": True, "false": False, "": None}


class ViewerSessions(StoreRoute):
    """Lists the sessions that meet conditions."""

    path = "/viewer/sessions"
    is_public = False
    methods = ("GET",)
    response_headers: ClassVar[Headers] = [*DATA_HEADERS, *JSON_HEADERS]
    summary = "The list of sessions with filters, for the page"

    async def reply(self, request: Request, services: Services) -> tuple[int, object]:
        """See `proxy.viewer.session_index`.

        `?search=&model=&metadata=&reason=&problem=&class=&weight_version=&reward_min=&reward_max=&rewarded=
        &drift=&sort=&order=&offset=&limit=`; unknown and repeated parameters are refused, except `metadata`.
        """
        indexes = services.session_indexes
        check_parameters(request, _PARAMETERS, several=("metadata",))
        offset, limit = _whole("offset", request, "0"), _whole("limit", request, "100")
        if not 1 <= limit <= _MOST_ROWS:
            raise BadRequest(f"`limit` must be between 1 and {_MOST_ROWS}", param="limit")
        return 200, await indexes.of(request.tenant).page(_query(request), offset, limit)


def _query(request: Request) -> ListQuery:
    """The conditions in the query. Raises BadRequest."""
    sort, order = query_value(request, "sort", Sort.USED), query_value(request, "order", "desc")
    if sort not in tuple(Sort):
        raise BadRequest(f"`sort` must be one of {', '.join(Sort)}", param="sort")
    if order not in ("asc", "desc"):
        raise BadRequest("`order` must be asc or desc", param="order")
    texts = {field: query_value(request, name, "") for name, field in _TEXTS.items()}
    return ListQuery(
        **texts,
        metadata=tuple(_metadata(condition) for condition in query_values(request, "metadata")),
        reward_min=_bound("reward_min", request),
        reward_max=_bound("reward_max", request),
        rewarded=_truth("rewarded", request),
        drift=_truth("drift", request),
        sort=Sort(sort),
        descending=order == "desc",
    )


def _metadata(condition: str) -> str:
    try:
        return metadata_condition(condition)
    except ValueError as error:
        raise BadRequest("`metadata` must be KEY=VALUE, as metadata=group%3D7", param="metadata") from error


def _bound(name: str, request: Request) -> float | None:
    text = query_value(request, name, "")
    if not text:
        return None
    bound = number(name, text)
    if math.isinf(bound):
        raise BadRequest(f"`{name}` must be a finite number", param=name)
    return bound


def _truth(name: str, request: Request) -> bool | None:
    text = query_value(request, name, "")
    if text not in _TRUTH:
        raise BadRequest(f"`{name}` must be true or false", param=name)
    return _TRUTH[text]


def _whole(name: str, request: Request, default: str) -> int:
    text = query_value(request, name, default)
    if not (text.isascii() and text.isdigit()) or len(text) > _MOST_DIGITS:
        raise BadRequest(f"`{name}` must be a whole number from 0 on", param=name)
    return int(text)
