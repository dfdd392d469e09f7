"""The list of all routes. A new route is a class in a file of its own and a line here."""

from tokenproxy.formats.chat import ChatFormat, TokensFormat
from tokenproxy.formats.messages.format import MessagesFormat
from tokenproxy.formats.prompts import CompletionsFormat, GenerateFormat
from tokenproxy.web.admin import Drain, Replicas, engine_admin_routes
from tokenproxy.web.base import Route
from tokenproxy.web.count_tokens import CountTokens
from tokenproxy.web.feed import FeedAcknowledge, FeedConsumers, FeedSamples, OneFeedConsumer
from tokenproxy.web.passthrough import PassThrough
from tokenproxy.web.responses import CompactResponses, OneResponse, Responses
from tokenproxy.web.sessions import (
    FinishSession,
    OneSession,
    SessionEnd,
    SessionReward,
    Sessions,
    SessionSamples,
    SessionTraces,
)
from tokenproxy.web.status import Health, MetricsPage, Ready, Root
from tokenproxy.web.tokenize import Tokenize
from tokenproxy.web.trl import trl_routes
from tokenproxy.web.turns import MessagesRoute, TurnRoute
from tokenproxy.web.viewer import (
    ViewerDrift,
    ViewerFile,
    ViewerPage,
    ViewerSession,
    ViewerSessions,
    ViewerSlash,
    ViewerTokens,
)


def all_routes() -> list[Route]:
    """An instance of each route; the catch-all route comes last."""
    return [
        TurnRoute(ChatFormat()),
        TurnRoute(TokensFormat()),
        TurnRoute(CompletionsFormat()),
        TurnRoute(GenerateFormat()),
        MessagesRoute(MessagesFormat()),
        CountTokens(),
        Responses(),
        CompactResponses(),
        OneResponse(),
        Tokenize(),
        Sessions(),
        OneSession(),
        SessionSamples(),
        SessionTraces(),
        SessionReward(),
        SessionEnd(),
        FinishSession(),
        FeedSamples(),
        FeedAcknowledge(),
        FeedConsumers(),
        OneFeedConsumer(),
        ViewerPage(),
        ViewerSlash(),
        ViewerFile(),
        ViewerSessions(),
        ViewerSession(),
        ViewerTokens(),
        ViewerDrift(),
        Replicas(),
        Drain(),
        Root(),
        Health(),
        Ready(),
        MetricsPage(),
        *engine_admin_routes(),
        *trl_routes(),
        PassThrough(),
    ]
