"""The routes of a turn: one for each wire format."""

from tokenproxy.base.http import Request, Response
from tokenproxy.formats.base import Dialect
from tokenproxy.formats.translated import serve_early, translated_error
from tokenproxy.turn.serve import serve_turn
from tokenproxy.turn.services import Services
from tokenproxy.web.base import Route, parsed
from tokenproxy.web.parameters import session_fields

_SILENCE_S = 15.0
"""Seconds of silence after which a stream is kept alive: Claude Code and Codex give up after 300 s."""


class TurnRoute(Route):
    """Serves the turns of one wire format."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self.path = dialect.path  # type: ignore[misc]
        self.summary = dialect.summary  # type: ignore[misc]
        self.openapi = dialect.openapi  # type: ignore[misc]

    @property
    def description(self) -> str:
        """What the OpenAPI page shows."""
        return type(self._dialect).__doc__ or ""

    async def answer(self, request: Request, services: Services, /) -> Response:
        """The response to one turn."""
        return await serve_dialect(self._dialect, request, services)


async def serve_dialect(dialect: Dialect, request: Request, services: Services) -> Response:
    """Respond to a request in a dialect, which may be one of this request alone. Raises ApiError."""
    session = await session_fields(request, services)
    chat = await parsed(request, services, lambda: dialect.parse(request, session))
    chat = await services.model_aliases.map(chat, services.fleet)
    translation = dialect.translation(chat)
    if translation is None:
        return await serve_turn(chat, services)
    translation.signer, translation.tenant = await services.history.echoes.signer(), chat.tenant
    translation.reasoning = chat.visible.reasoning
    if chat.stream:
        return await serve_early(lambda: serve_turn(chat, services, translation), translation, _SILENCE_S)
    return await translated_error(await serve_turn(chat, services, translation), translation)
