"""Every other route of the engine, untouched."""

from proxy.dialects.base import Dialect, Gateway, Incoming
from proxy.engine.protocol import Answer, Call

_GENERATION = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/tokenize",
    "/detokenize",
)


class PassThrough(Dialect):
    """Chat, completions, responses, messages, embeddings, models, metrics and what else the engine has."""

    path = "/{path:path}"
    methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
    inside_vllm = False
    catches_all = True

    async def answer(self, incoming: Incoming, gateway: Gateway) -> Answer:
        """The engine's answer."""
        route = incoming.path.partition("?")[0]
        repeatable = incoming.method in ("GET", "HEAD") or route in _GENERATION
        call = Call(incoming.method, incoming.path, incoming.headers, incoming.body, repeatable)
        return await gateway.fleet.send(call)
