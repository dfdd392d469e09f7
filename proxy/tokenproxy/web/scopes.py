"""The scopes of an API key: inference, reading recordings, administration.

A route of the engine that is on no list needs `admin`. So a development route that a new version of vLLM adds
needs `admin` by default.
"""

from enum import StrEnum

SCOPES_KEY = "tokenproxy.scopes"
"""Key of the ASGI scope with the scopes of a request's client."""


class KeyScope(StrEnum):
    """The rights of a key. No scope includes another."""

    INFERENCE = "inference"
    """Turns, tokenising, the engine's inference routes; creating, rewarding and deleting the tenant's
    sessions."""
    READ = "read"
    """Sessions, the viewer's data, samples, the details of `/ready`, metrics."""
    ADMIN = "admin"
    """The routes under `/admin/`, and every route of the engine that is on no list here."""


EVERY_SCOPE = frozenset(KeyScope)
WITHOUT_ADMIN = frozenset({KeyScope.INFERENCE, KeyScope.READ})

_INFERENCE = (
    "/v1/audio",
    "/v1/chat",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/models",
    "/v1/rerank",
    "/v1/responses",
    "/v1/score",
    "/v1/systemone",
    "/v2/embed",
    "/v2/rerank",
    "/classify",
    "/cohere/v2/chat",
    "/detokenize",
    "/generative_scoring",
    "/inference/v1/generate",
    "/invocations",
    "/pooling",
    "/rerank",
    "/score",
    "/tokenize",
    "/tokenizer_info",
)
"""Routes of vLLM that change nothing in it; the paths below them too."""
_READ = ("/load", "/ping", "/version")


def scope_of_engine_route(path: str) -> KeyScope:
    """The scope that a request for a route of the engine needs.

    Args:
        path: the engine's path, percent-decoded once, without the query.
    """
    if path == "/" or _is_below(path, _INFERENCE):  # Claude Code sends HEAD / when it starts
        return KeyScope.INFERENCE
    return KeyScope.READ if _is_below(path, _READ) else KeyScope.ADMIN


def _is_below(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)
