"""`POST /v1/messages`: turns in Anthropic's wire format."""

from proxy.dialects.messages.dialect import FleetTemplate, MessagesDialect
from proxy.http import Request, Response
from proxy.routes.turns import TurnRoute, serve_dialect
from proxy.turn.services import Services


class MessagesRoute(TurnRoute):
    """Serves turns that are converted for the fleet's chat template."""

    def __init__(self) -> None:
        super().__init__(MessagesDialect())
        self._template = FleetTemplate()

    async def answer(self, request: Request, services: Services, /) -> Response:
        """The message, or the events of its stream."""
        dialect = MessagesDialect(await self._template.facts(services))
        return await serve_dialect(dialect, request, services)
