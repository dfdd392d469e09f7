"""The paths of a route: a canonical one, and aliases for clients whose base URL is written differently.

`/v1/chat/completions` is also served at `/chat/completions`, and both with a trailing slash. The route, the
engine and the log always get the canonical path.
"""

import re
from collections.abc import Mapping
from urllib.parse import quote

UNDER_V1 = frozenset({"audio", "chat", "completions", "embeddings", "messages", "models", "responses"})
"""First segments of routes that vLLM serves under `/v1` only. `score` and `rerank` are not among them: vLLM
serves both without `/v1` as well, and its --api-key guards only the paths with `/v1`."""
AT_ROOT = frozenset({"tokenize", "detokenize"})
"""Routes that vLLM serves without `/v1` only. A client whose base URL ends in `/v1` requests them under
`/v1`."""

_PARAMETER = re.compile(r"\{(\w+)\}")


def other_paths(path: str, *, under_v1: bool) -> list[str]:
    """The other path templates of the route with this path.

    `/v1/sessions` has `/v1/sessions/`, `/sessions` and `/sessions/`.

    Args:
        under_v1: whether a path without `/v1` is served with it, too.
    """
    paths = [path]
    if path.startswith("/v1/"):
        paths.append(path.removeprefix("/v1"))
    elif under_v1:
        paths.append(f"/v1{path}")
    return [*paths[1:], *(f"{one}/" for one in paths)]


def fill(template: str, parameters: Mapping[str, str]) -> str:
    """The path of a template, percent-encoded: `/v1/sessions/{session}` becomes `/v1/sessions/run-7`."""
    return _PARAMETER.sub(lambda name: quote(parameters[name[1]], safe=":@+="), template)


def engine_path(path: str) -> str:
    """The path under which the engine serves a client's path; any other path unchanged.

    `/models/` becomes `/v1/models`, and `/v1/detokenize` becomes `/detokenize`.
    """
    segments = path.split("/")
    first, bare = segments[1:2], path
    if first == ["v1"]:
        first, bare = segments[2:3], path.removeprefix("/v1")
    if not first:
        return path
    if first[0] in UNDER_V1:
        return "/v1" + bare.rstrip("/")
    return bare.rstrip("/") if bare.rstrip("/").removeprefix("/") in AT_ROOT else path
