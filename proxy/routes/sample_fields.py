"""The parameters of the routes that return samples."""

from proxy.errors import BadRequest
from proxy.http import Request, query_value, query_values
from proxy.samples.layouts import LAYOUTS, Layout
from proxy.samples.samples import Shared


def requested_shared(request: Request) -> Shared:
    """The parameter `shared`. Raises BadRequest."""
    shared = query_value(request, "shared", "once")
    if shared == "each":
        return "each"
    if shared == "once":
        return "once"
    raise BadRequest("`shared` must be `once` or `each`", param="shared")


def requested_layout(request: Request) -> Layout:
    """The parameter `layout`. Raises BadRequest."""
    layout = query_value(request, "layout", "plain")
    if layout not in LAYOUTS:
        raise BadRequest(f"`layout` must be one of {', '.join(LAYOUTS)}", param="layout")
    return LAYOUTS[layout]


def requested_classes(request: Request) -> frozenset[str]:
    """The parameter `class`, which may be repeated; empty for all classes."""
    return frozenset(query_values(request, "class"))
