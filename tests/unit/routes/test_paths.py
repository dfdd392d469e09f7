"""Aliases of the proxy's routes, and the engine's own paths."""

import pytest

from proxy.routes.paths import engine_path
from proxy.routes.routes import all_routes
from proxy.routes.session_prefix import WITHOUT_V1

_OURS = [route for route in all_routes() if not route.catches_all]


def test_every_route_has_aliases_and_no_two_share_one() -> None:
    paths = [path for route in _OURS for path in (route.path, *route.aliases)]
    assert len(set(paths)) == len(paths)
    # the viewer's files are named relative to its page
    assert [route.path for route in _OURS if not route.aliases] == ["/viewer", "/viewer/", "/"]


def test_no_path_of_a_session_has_two_meanings() -> None:
    aliases = [alias.split("/") for route in _OURS for alias in route.aliases]
    following = {parts[3] for parts in aliases if parts[1:3] == ["sessions", "{session}"] and len(parts) > 3}
    assert following == {"", "samples", "traces", "reward", "end"}
    assert following.isdisjoint({*WITHOUT_V1, "v1"})


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/models/a%2Fb", "/v1/models/a%2Fb"),
        ("/responses/resp_1/cancel/", "/v1/responses/resp_1/cancel"),
        ("/v1/detokenize/", "/detokenize"),
        *((same, same) for same in ("/v1/models", "/v1/", "/", "", "/some/where/", "/modelsx", "//models")),
    ],
)
def test_engine_path(path: str, expected: str) -> None:
    assert engine_path(path) == expected
