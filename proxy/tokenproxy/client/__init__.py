"""A small client of the proxy, for trainers and environments: sessions, rewards, samples, the token route.

    with Client("http://127.0.0.1:8100") as client:
        for rollout in client.feed("trainer"):
            train(rollout.samples)

It needs httpx and msgspec only, and nothing else of this package.
"""

from tokenproxy.client.client import AsyncClient, Client
from tokenproxy.client.errors import (
    AccessDenied,
    ErrorResponse,
    InvalidRequest,
    KeyRefused,
    NoResponse,
    ProxyError,
    ServerFailure,
    TemporaryFailure,
    TooManyRequests,
    UnknownResource,
    UnreadableResponse,
)
from tokenproxy.client.values import (
    FeedConsumer,
    FeedPage,
    FeedRollout,
    FeedSelection,
    ModelInfo,
    SampleSelection,
    SessionFields,
    SessionInfo,
    SessionSampleList,
    TokenTurn,
)

__all__ = [
    "AccessDenied",
    "AsyncClient",
    "Client",
    "ErrorResponse",
    "FeedConsumer",
    "FeedPage",
    "FeedRollout",
    "FeedSelection",
    "InvalidRequest",
    "KeyRefused",
    "ModelInfo",
    "NoResponse",
    "ProxyError",
    "SampleSelection",
    "ServerFailure",
    "SessionFields",
    "SessionInfo",
    "SessionSampleList",
    "TemporaryFailure",
    "TokenTurn",
    "TooManyRequests",
    "UnknownResource",
    "UnreadableResponse",
]
