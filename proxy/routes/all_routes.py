"""The routes of the proxy: an explicit list."""

from proxy.dialects.chat import Chat
from proxy.dialects.tokens import Tokens
from proxy.routes.base import Route
from proxy.routes.health import Health
from proxy.routes.metrics import MetricsPage
from proxy.routes.passthrough import PassThrough
from proxy.routes.ready import Ready
from proxy.routes.sessions import OneSession, SessionReward, Sessions, SessionSamples
from proxy.routes.tokenize import Tokenize


def all_routes() -> list[Route]:
    """One of each route; the one that catches everything comes last."""
    return [
        Chat(),
        Tokens(),
        Health(),
        MetricsPage(),
        Ready(),
        Sessions(),
        OneSession(),
        SessionReward(),
        SessionSamples(),
        Tokenize(),
        PassThrough(),
    ]
