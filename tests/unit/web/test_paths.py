"""The canonical paths of clients' paths."""

import pytest

from tokenproxy.base.errors import NotFound
from tokenproxy.web.paths import AT_ROOT, OF_A_SESSION, UNDER_V1, Paths
from tokenproxy.web.routes import all_routes

_OURS = [route.path for route in all_routes() if not route.catches_all]
_PATHS = Paths(path for path in _OURS if "{" not in path)


def test_every_route_is_found_under_its_other_paths() -> None:
    for template in _OURS:
        path = template.replace("{", "").replace("}", "")
        others = {path, f"{path}/"} if path.startswith("/v1/") else {path}
        others |= {other.removeprefix("/v1") for other in others}
        others |= {f"/v1{path}/"} if path.removeprefix("/") in AT_ROOT else set()
        assert {_PATHS.canonical(other) for other in others} == {(path, "")}


def test_no_path_of_a_session_has_two_meanings() -> None:
    parts = [path.split("/") for path in _OURS if path.startswith("/v1/sessions/{session}")]
    assert {path[4] for path in parts if len(path) > 4} == OF_A_SESSION - {""}
    assert OF_A_SESSION & {*AT_ROOT, *(UNDER_V1 - {"samples"}), "v1"} == set()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/models/a%2Fb", "/v1/models/a%2Fb"),
        ("/responses/resp_1/cancel/", "/v1/responses/resp_1/cancel"),
        ("/v1/detokenize/", "/detokenize"),
        ("/health/", "/health"),
        *((same, same) for same in ("/v1/models", "/v1/", "/", "", "/some/where/", "/modelsx", "//models")),
        *((same, same) for same in ("/v1models", "/v1//models", "/viewer/", "/viewer")),
    ],
)
def test_paths_without_a_session(path: str, expected: str) -> None:
    assert _PATHS.canonical(path) == (expected, "")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions/", "/models/", "/tokenize"])
def test_paths_in_a_session(path: str) -> None:
    assert _PATHS.canonical(f"/sessions/a%7Eb{path}") == (_PATHS.canonical(path)[0], "a~b")
    assert _PATHS.canonical(f"/sessions/a/b:0/v1{path}") == (_PATHS.canonical(f"/v1{path}")[0], "a=2Fb:0")
    with pytest.raises(NotFound, match="base URL of a session is /sessions/s/v1"):
        _PATHS.canonical("/sessions/s/pause")
