"""The parameters in the query of a request. Every function raises BadRequest for a wrong one."""

import re
from collections import Counter
from collections.abc import Collection, Sequence

from tokenproxy.base.errors import BadRequest
from tokenproxy.base.http import Request, query_pairs, query_value, query_values
from tokenproxy.record.store import Session
from tokenproxy.samples.layouts import LAYOUTS, Layout
from tokenproxy.samples.samples import Shared

_NUMBER = re.compile(r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|inf)", re.IGNORECASE)
"""`float` also takes NaN, digits of other scripts, spaces around them and underscores between them."""
_MOST_LISTED = 1000


def check_parameters(request: Request, known: Sequence[str], several: Collection[str] = ()) -> None:
    """Refuse names that the route does not have: a filter that is not understood must not be ignored.

    Args:
        several: parameters that may be repeated.
    """
    counts = Counter(name for name, _ in query_pairs(request))
    for name, count in counts.items():
        if name not in known:
            raise BadRequest(f"`{name}` is no parameter of this route: it has {', '.join(known)}", param=name)
        if count > 1 and name not in several:
            raise BadRequest(f"`{name}` must not be repeated", param=name)


def number(name: str, text: str) -> float:
    """The number that a parameter holds; `inf` and `-inf` are numbers."""
    if not _NUMBER.fullmatch(text):
        raise BadRequest(f"`{name}` must be a number", param=name)
    return float(text)


def requested_page(request: Request) -> tuple[int, float]:
    """The parameters `limit` and `before`, which is the field `next` or a time."""
    limit = number("limit", query_value(request, "limit", "100"))
    if not 1 <= limit <= _MOST_LISTED:
        raise BadRequest(f"`limit` must be between 1 and {_MOST_LISTED}", param="limit")
    return int(limit), number("before", query_value(request, "before", "") or "inf")


def next_page(last: Session) -> str:
    """The `before` of the page after a session."""
    return repr(last.used)


def requested_shared(request: Request) -> Shared:
    """The parameter `shared`."""
    shared = query_value(request, "shared", "once")
    if shared == "each":
        return "each"
    if shared == "once":
        return "once"
    raise BadRequest("`shared` must be `once` or `each`", param="shared")


def requested_layout(request: Request) -> Layout:
    """The parameter `layout`."""
    layout = query_value(request, "layout", "plain")
    if layout not in LAYOUTS:
        raise BadRequest(f"`layout` must be one of {', '.join(LAYOUTS)}", param="layout")
    return LAYOUTS[layout]


def requested_classes(request: Request) -> frozenset[str]:
    """The parameter `class`, which may be repeated; empty for all classes."""
    return frozenset(query_values(request, "class"))
