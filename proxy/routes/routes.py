"""The list of all routes. A new route is a class in a file of its own and a line here."""

from proxy.dialects.chat import ChatDialect, TokensDialect
from proxy.dialects.prompts import CompletionsDialect, GenerateDialect
from proxy.routes.admin import Drain, Replicas, engine_admin_routes
from proxy.routes.base import Route
from proxy.routes.count_tokens import CountTokens
from proxy.routes.feed import FeedAcknowledge, FeedConsumers, FeedSamples, OneFeedConsumer
from proxy.routes.messages import MessagesRoute
from proxy.routes.passthrough import PassThrough
from proxy.routes.responses import CompactResponses, OneResponse, Responses
from proxy.routes.sessions import (
    FinishSession,
    OneSession,
    SessionEnd,
    SessionReward,
    Sessions,
    SessionSamples,
    SessionTraces,
)
from proxy.routes.status import Health, MetricsPage, Ready, Root
from proxy.routes.tokenize import Tokenize
from proxy.routes.trl import trl_routes
from proxy.routes.turns import TurnRoute
from proxy.routes.viewer import (
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
        TurnRoute(ChatDialect()),
        TurnRoute(TokensDialect()),
        TurnRoute(CompletionsDialect()),
        TurnRoute(GenerateDialect()),
        MessagesRoute(),
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
