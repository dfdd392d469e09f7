"""`POST /v1/messages`: turns in Anthropic's wire format."""

from tokenproxy.base.http import Request, Response
from tokenproxy.formats.messages.dialect import FleetTemplate, MessagesDialect
from tokenproxy.turn.services import Services
from tokenproxy.web.turns import TurnRoute, serve_dialect


class MessagesRoute(TurnRoute):
    """Serves turns that are converted for the fleet's chat template."""

    def __init__(self) -> None:
        super().__init__(MessagesDialect())
        self._template = FleetTemplate()

    async def answer(self, request: Request, services: Services, /) -> Response:
        """The message, or the events of its stream."""
        dialect = MessagesDialect(await self._template.facts(services))
        return await serve_dialect(dialect, request, services)
