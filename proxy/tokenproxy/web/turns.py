"""The routes of a turn: one for each wire format."""

from tokenproxy.base.errors import ApiError
from tokenproxy.base.http import Request, Response
from tokenproxy.engine.protocol import error_text
from tokenproxy.formats.base import Format
from tokenproxy.formats.messages.format import MessagesFormat
from tokenproxy.formats.translated import serve_early, translated_error
from tokenproxy.record.refusals import count_refusal
from tokenproxy.record.store import session_id
from tokenproxy.turn.serve import serve_turn
from tokenproxy.turn.services import Services
from tokenproxy.web.base import Route, parsed
from tokenproxy.web.parameters import named_session

_SILENCE_S = 15.0
"""Seconds of silence after which a stream is kept alive: Claude Code and Codex give up after 300 s."""


class TurnRoute(Route):
    """Serves the turns of one wire format."""

    def __init__(self, wire_format: Format) -> None:
        self._format = wire_format
        self.path = wire_format.path  # type: ignore[misc]
        self.summary = wire_format.summary  # type: ignore[misc]
        self.openapi = wire_format.openapi  # type: ignore[misc]

    @property
    def description(self) -> str:
        """What the OpenAPI page shows."""
        return type(self._format).__doc__ or ""

    async def answer(self, request: Request, services: Services, /) -> Response:
        """The response to one turn."""
        return await serve_format(self._format, request, services)


class MessagesRoute(TurnRoute):
    """Serves turns that are converted for the fleet's chat template."""

    async def answer(self, request: Request, services: Services, /) -> Response:
        """The message, or the events of its stream."""
        return await serve_format(MessagesFormat(await services.fleet.served_model()), request, services)


async def serve_format(wire_format: Format, request: Request, services: Services) -> Response:
    """Respond to a request in a wire format, which may be one of this request alone. Raises ApiError."""
    session = await named_session(request, services)
    rollout = session_id(request.tenant, session.ref.name) if session else ""
    try:
        chat = await parsed(request, services, lambda: wire_format.parse(request, session))
        chat = await services.model_aliases.map(chat, services.fleet)
    except ApiError as error:
        await count_refusal(services.store, rollout, error.status, error.message)
        raise

    async def serve() -> Response:
        try:
            response = await serve_turn(chat, services, translation)
        except ApiError as error:
            await count_refusal(services.store, rollout, error.status, error.message)
            raise
        if response.status >= 400:
            await count_refusal(services.store, rollout, response.status, error_text(await response.read()))
        return response

    translation = wire_format.translation(chat)
    if translation is None:
        return await serve()
    translation.signer, translation.tenant = await services.history.echoes.signer(), chat.tenant
    translation.reasoning = chat.visible.reasoning
    if chat.stream:
        return await serve_early(serve, translation, _SILENCE_S)
    return await translated_error(await serve(), translation)
