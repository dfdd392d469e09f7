"""The clients of the proxy: `Client` blocks, `AsyncClient` has the same methods for asyncio."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar, Unpack

import httpx

from tokenproxy.client import calls
from tokenproxy.client.calls import Address, Call, Patience
from tokenproxy.client.errors import ProxyError
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

T = TypeVar("T")


class Client:
    """Sessions, rewards, samples and the token route of one proxy. Safe to use from several threads.

    Every method raises ProxyError; see `tokenproxy.client.errors`.
    """

    def __init__(self, url: str, *, api_key: str | None = None, http: httpx.Client | None = None) -> None:
        """Connects with the first request.

        Args:
            url: of the proxy, with or without `/v1`.
            api_key: sent with each request.
            http: the HTTP client to use, which stays open; None makes one.
        """
        self._http = http if http is not None else httpx.Client(limits=calls.LIMITS)
        self._owned = http is None
        self._address = Address(url, api_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        if self._owned:
            self._http.close()

    def models(self) -> list[ModelInfo]:
        """The models that the engines serve, base model and adapters."""
        return self._run(calls.list_models())

    def create_session(self, session: str | None = None, **fields: Unpack[SessionFields]) -> SessionInfo:
        """Create a session, or change its description.

        Args:
            session: its name; None lets the proxy choose one.
        """
        return self._run(calls.save_session(session, **fields))

    def session(self, session: str, *, ids: bool = False) -> SessionInfo:
        """A session with its turns; `ids` adds their ids and log-probabilities."""
        return self._run(calls.read_session(session, ids))

    def delete_session(self, session: str) -> None:
        """Remove a session with all its turns."""
        self._run(calls.delete_session(session))

    def end_session(self, session: str) -> bool:
        """End a session: no request follows. False if the feed has it already, or it has no turns."""
        return self._run(calls.end_session(session))

    def set_reward(self, session: str, reward: float, *, turn: str | None = None) -> dict[str, float]:
        """Set the reward of a session, which finishes it, or of one turn. Returns all its rewards."""
        return self._run(calls.set_rewards(session, {turn or "": reward}))

    def set_rewards(self, session: str, rewards: Mapping[str, float]) -> dict[str, float]:
        """Set the rewards of turns by their ids, and of the session by "". Returns all its rewards."""
        return self._run(calls.set_rewards(session, rewards))

    def samples(self, session: str, **selection: Unpack[SampleSelection]) -> SessionSampleList:
        """The training samples of one session."""
        return self._run(calls.session_samples(session, **selection))

    def read_feed(
        self,
        consumer: str | None = None,
        *,
        after: str | None = None,
        wait_s: float = 0.0,
        **selection: Unpack[FeedSelection],
    ) -> FeedPage:
        """Finished rollouts after a cursor, else after what the consumer acknowledged, else all.

        Args:
            wait_s: seconds to wait until there is one.
        """
        return self._run(calls.read_feed(consumer, after, wait_s, **selection))

    def feed(
        self,
        consumer: str,
        *,
        after: str | None = None,
        wait_s: float = 30.0,
        acknowledge: bool = True,
        patience_s: float = 300.0,
        **selection: Unpack[FeedSelection],
    ) -> Iterator[FeedRollout]:
        """Finished rollouts without end, in the order of finishing, each at least once.

        The rollouts of one response (`limit`) are acknowledged when the first one after them is requested. If
        the loop ends or its process is killed before, they are delivered again to the next loop.

        Args:
            consumer: name under which the position is kept. One loop at a time should use it.
            acknowledge: False leaves that to the caller: `acknowledge(consumer, rollout.cursor)`.
            patience_s: how long requests are repeated while the proxy does not respond.
        """
        selection = calls.repeatable(selection)
        while True:
            page = self._retry(calls.read_feed(consumer, after, wait_s, **selection), patience_s)
            yield from page.data
            if acknowledge and page.cursor != after:
                self._retry(calls.acknowledge(consumer, page.cursor), patience_s)
            after = page.cursor

    def acknowledge(self, consumer: str, cursor: str) -> str:
        """Note that a consumer has processed everything up to a cursor; returns the acknowledged cursor."""
        return self._run(calls.acknowledge(consumer, cursor))

    def consumers(self) -> list[FeedConsumer]:
        """The consumers of the feed, and how far each has read."""
        return self._run(calls.list_consumers())

    def forget_consumer(self, consumer: str) -> None:
        """Remove a consumer; if it reads again, it starts with the first rollout."""
        self._run(calls.forget_consumer(consumer))

    def token_turn(
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
        return self._run(call)

    def _run(self, call: Call[T]) -> T:
        with self._address.explained():
            response = self._http.request(**self._address.arguments(call))
        return call.result(response)

    def _retry(self, call: Call[T], patience_s: float) -> T:
        patience = Patience(patience_s, time.monotonic)
        while True:
            try:
                return self._run(call)
            except ProxyError as error:
                time.sleep(patience.pause(error))


class AsyncClient:
    """Sessions, rewards, samples and the token route of one proxy. For one event loop.

    Every method raises ProxyError; see `tokenproxy.client.errors`.
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

    async def __aexit__(self, *error: object) -> None:
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

    async def samples(self, session: str, **selection: Unpack[SampleSelection]) -> SessionSampleList:
        """See `Client.samples`."""
        return await self._run(calls.session_samples(session, **selection))

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
        selection = calls.repeatable(selection)
        while True:
            page = await self._retry(calls.read_feed(consumer, after, wait_s, **selection), patience_s)
            for rollout in page.data:
                yield rollout
            if acknowledge and page.cursor != after:
                await self._retry(calls.acknowledge(consumer, page.cursor), patience_s)
            after = page.cursor

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
