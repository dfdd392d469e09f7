"""The parameters of a route: a filter that is not understood must not be ignored."""

from collections import Counter
from collections.abc import Collection, Sequence

from proxy.errors import BadRequest
from proxy.http import Request, query_pairs


def check_parameters(request: Request, known: Sequence[str], several: Collection[str] = ()) -> None:
    """Check the names in a query.

    Args:
        several: parameters that may be repeated.

    Raises:
        BadRequest: for a name that the route does not have, or that stands there more than once.
    """
    counts = Counter(name for name, _ in query_pairs(request))
    for name, count in counts.items():
        if name not in known:
            raise BadRequest(f"`{name}` is no parameter of this route: it has {', '.join(known)}", param=name)
        if count > 1 and name not in several:
            raise BadRequest(f"`{name}` must not be repeated", param=name)
