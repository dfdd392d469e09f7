"""A client of the proxy for asyncio. `Client` is the same for threads."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx

from proxy.client import calls
from proxy.client.calls import Address, Call, FeedPosition, Patience
from proxy.client.errors import ProxyError
from proxy.client.values import (
    FeedConsumer,
    FeedPage,
    FeedRollout,
    FeedSelection,
    ModelInfo,
    SessionFields,
    SessionInfo,
    SessionSampleList,
    TokenTurn,
)

T = TypeVar("T")


class AsyncClient:
    """Sessions, rewards, samples and the token route of one proxy. For one event loop.

    Every method raises ProxyError; see `proxy.client.errors`.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, http: httpx.AsyncClient | None = None
    ) -> None:
        """See `Client`."""
        self._http = http if http is not None else httpx.AsyncClient(limits=calls.LIMITS)
        self._owned = http is None
        self._address = Address(url, api_key)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        if self._owned:
            await self._http.aclose()

    async def models(self) -> list[ModelInfo]:
        """See `Client.models`."""
        return await self._run(calls.list_models())

    async def create_session(
        self, session: str | None = None, **fields: Unpack[SessionFields]
    ) -> SessionInfo:
        """See `Client.create_session`."""
        return await self._run(calls.save_session(session, **fields))

    async def session(self, session: str, *, ids: bool = False) -> SessionInfo:
        """See `Client.session`."""
        return await self._run(calls.read_session(session, ids))

    async def delete_session(self, session: str) -> None:
        """See `Client.delete_session`."""
        await self._run(calls.delete_session(session))

    async def end_session(self, session: str) -> bool:
        """See `Client.end_session`."""
        return await self._run(calls.end_session(session))

    async def set_reward(self, session: str, reward: float, *, turn: str | None = None) -> dict[str, float]:
        """See `Client.set_reward`."""
        return await self._run(calls.set_rewards(session, {turn or "": reward}))

    async def set_rewards(self, session: str, rewards: Mapping[str, float]) -> dict[str, float]:
        """See `Client.set_rewards`."""
        return await self._run(calls.set_rewards(session, rewards))

    async def samples(
        self, session: str, *, classes: Iterable[str] = (), layout: str = "plain", shared: str = "once"
    ) -> SessionSampleList:
        """See `Client.samples`."""
        return await self._run(calls.session_samples(session, layout, shared, classes))

    async def read_feed(
        self,
        consumer: str | None = None,
        *,
        after: str | None = None,
        wait_s: float = 0.0,
        **selection: Unpack[FeedSelection],
    ) -> FeedPage:
        """See `Client.read_feed`."""
        return await self._run(calls.read_feed(consumer, after, wait_s, **selection))

    async def feed(
        self,
        consumer: str,
        *,
        after: str | None = None,
        wait_s: float = 30.0,
        acknowledge: bool = True,
        patience_s: float = 300.0,
        **selection: Unpack[FeedSelection],
    ) -> AsyncIterator[FeedRollout]:
        """See `Client.feed`."""
        position = FeedPosition(consumer, after, wait_s, acknowledge, selection)
        while True:
            page = await self._retry(position.next_page(), patience_s)
            for rollout in page.data:
                yield rollout
            if (acknowledgement := position.move_after(page)) is not None:
                await self._retry(acknowledgement, patience_s)

    async def acknowledge(self, consumer: str, cursor: str) -> str:
        """See `Client.acknowledge`."""
        return await self._run(calls.acknowledge(consumer, cursor))

    async def consumers(self) -> list[FeedConsumer]:
        """See `Client.consumers`."""
        return await self._run(calls.list_consumers())

    async def forget_consumer(self, consumer: str) -> None:
        """See `Client.forget_consumer`."""
        await self._run(calls.forget_consumer(consumer))

    async def token_turn(
        self,
        prompt_ids: Sequence[int] | None = None,
        append_messages: Sequence[Mapping[str, Any]] | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        session: str | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> TokenTurn:
        """See `Client.token_turn`."""
        call = calls.token_turn(prompt_ids, append_messages, messages, session, timeout_s, options)
        return await self._run(call)

    async def _run(self, call: Call[T]) -> T:
        with self._address.explained():
            response = await self._http.request(**self._address.arguments(call))
        return call.result(response)

    async def _retry(self, call: Call[T], patience_s: float) -> T:
        patience = Patience(patience_s, time.monotonic)
        while True:
            try:
                return await self._run(call)
            except ProxyError as error:
                await asyncio.sleep(patience.pause(error))
