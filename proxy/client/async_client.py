"""A client of the proxy for asyncio. `Client` is the same for threads."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from proxy.client import calls
from proxy.client.calls import Call, Patience
from proxy.client.errors import NoResponse, ProxyError
from proxy.client.values import (
    FeedConsumer,
    FeedPage,
    FeedRollout,
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
        """Connects with the first request.

        Args:
            url: of the proxy, with or without `/v1`.
            api_key: sent with each request.
            http: the HTTP client to use, which stays open; None makes one.
        """
        self._http = http if http is not None else httpx.AsyncClient()
        self._owned = http is None
        self._url = calls.base_url(url)
        self._headers = calls.headers(api_key)

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

    async def create_session(
        self,
        session: str | None = None,
        *,
        defaults: Mapping[str, Any] | None = None,
        overrides: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> SessionInfo:
        """Create a session, or change its description: what is None stays.

        Args:
            session: its name; None lets the proxy choose one.
            defaults: fields of a chat request that apply where a request does not set them.
            overrides: fields of a chat request that replace those of a request.
        """
        return await self._run(calls.save_session(session, defaults, overrides, metadata))

    async def session(self, session: str, *, ids: bool = False) -> SessionInfo:
        """A session with its turns; `ids` adds their ids and log-probabilities."""
        return await self._run(calls.read_session(session, ids))

    async def delete_session(self, session: str) -> None:
        """Remove a session with all its turns."""
        await self._run(calls.delete_session(session))

    async def end_session(self, session: str) -> bool:
        """End a session: no request follows. False if the feed has it already, or it has no turns."""
        return await self._run(calls.end_session(session))

    async def set_reward(self, session: str, reward: float, *, turn: str | None = None) -> dict[str, float]:
        """Set the reward of a session, which finishes it, or of one turn. Returns all its rewards."""
        return await self._run(calls.set_rewards(session, {turn or "": reward}))

    async def set_rewards(self, session: str, rewards: Mapping[str, float]) -> dict[str, float]:
        """Set the rewards of turns by their ids, and of the session by "". Returns all its rewards."""
        return await self._run(calls.set_rewards(session, rewards))

    async def samples(
        self, session: str, *, layout: str = "plain", shared: str = "once"
    ) -> SessionSampleList:
        """The training samples of one session."""
        return await self._run(calls.session_samples(session, layout, shared))

    async def read_feed(
        self,
        consumer: str | None = None,
        *,
        after: str | None = None,
        wait_s: float = 0.0,
        limit: int = 16,
        metadata: Mapping[str, str] | None = None,
        weight_versions: Iterable[str] = (),
        layout: str = "plain",
        shared: str = "once",
    ) -> FeedPage:
        """Finished rollouts after a cursor, else after what the consumer acknowledged, else all.

        Args:
            wait_s: seconds to wait until there is one.
            limit: of rollouts.
            metadata: values that the session's metadata must have.
            weight_versions: samples whose turns were all sampled by these weights; empty for all samples.
        """
        return await self._run(
            calls.read_feed(consumer, after, wait_s, limit, metadata, weight_versions, layout, shared)
        )

    async def feed(
        self,
        consumer: str,
        *,
        after: str | None = None,
        wait_s: float = 30.0,
        limit: int = 16,
        metadata: Mapping[str, str] | None = None,
        weight_versions: Iterable[str] = (),
        layout: str = "plain",
        shared: str = "once",
        acknowledge: bool = True,
        patience_s: float = 300.0,
    ) -> AsyncIterator[FeedRollout]:
        """Finished rollouts for ever, in the order of finishing, each at least once.

        The rollouts of one response (`limit`) are acknowledged when the first one after them is requested. If
        the loop ends or its process is killed before, they are delivered again to the next loop.

        Args:
            consumer: name under which the position is kept. One loop at a time should use it.
            acknowledge: False leaves that to the caller: `acknowledge(consumer, rollout.cursor)`.
            patience_s: how long a proxy that does not respond is tried again.
        """
        weights = tuple(weight_versions)
        while True:
            page = await self._retry(
                calls.read_feed(consumer, after, wait_s, limit, metadata, weights, layout, shared),
                patience_s,
            )
            for rollout in page.data:
                yield rollout
            if acknowledge and page.cursor != after:
                await self._retry(calls.acknowledge(consumer, page.cursor), patience_s)
            after = page.cursor

    async def acknowledge(self, consumer: str, cursor: str) -> str:
        """Note that a consumer has processed everything up to a cursor; returns the acknowledged cursor."""
        return await self._run(calls.acknowledge(consumer, cursor))

    async def consumers(self) -> list[FeedConsumer]:
        """The consumers of the feed, and how far each has read."""
        return await self._run(calls.list_consumers())

    async def forget_consumer(self, consumer: str) -> None:
        """Remove a consumer; if it reads again, it begins at the beginning."""
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
        """Sample one turn on exact ids, with log-probabilities.

        Args:
            prompt_ids: the exact prompt: `TokenTurn.ids` of the turn before. None for a first turn.
            append_messages: messages to append to it: tool results, user text.
            messages: those of a first turn; or, with `prompt_ids`, the history that led to them.
            session: the rollout that records the turn.
            timeout_s: for the response; None for no limit.
            options: other fields of a chat completion: `model`, `temperature`, `tools`, ...

        Raises:
            ValueError: `stream` or `n` is among the options.
        """
        call = calls.token_turn(prompt_ids, append_messages, messages, session, timeout_s, options)
        return await self._run(call)

    async def _run(self, call: Call[T]) -> T:
        arguments = call.arguments()
        arguments["url"] = self._url + arguments["url"]
        arguments["headers"] |= self._headers
        try:
            response = await self._http.request(**arguments)
        except httpx.TransportError as error:
            raise NoResponse(f"no response of {self._url}: {error or type(error).__name__}") from error
        return call.result(response)

    async def _retry(self, call: Call[T], patience_s: float) -> T:
        patience = Patience(patience_s, time.monotonic)
        while True:
            try:
                return await self._run(call)
            except ProxyError as error:
                await asyncio.sleep(patience.pause(error))
