"""Every other route of the engine, untouched."""

from proxy.http import Request, Response
from proxy.routes.base import Route
from proxy.turn.services import Services

_GENERATION = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/tokenize",
    "/detokenize",
)


class PassThrough(Route):
    """Chat, completions, responses, messages, embeddings, models, metrics and what else the engine has."""

    path = "/{path:path}"
    methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
    inside_vllm = False
    catches_all = True

    async def answer(self, incoming: Request, gateway: Services) -> Response:
        """The engine's answer."""
        route = incoming.path.partition("?")[0]
        repeatable = incoming.method in ("GET", "HEAD") or route in _GENERATION
        call = Request(incoming.method, incoming.path, incoming.headers, incoming.body, repeatable)
        return await gateway.fleet.send(call)
