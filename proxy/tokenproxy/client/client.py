"""The clients of the proxy: `Client` blocks, `AsyncClient` has the same methods for asyncio.

The functions of `calls` declare each method once, for both.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import update_wrapper
from inspect import Parameter, signature
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack, get_args

import httpx

from tokenproxy.client import calls
from tokenproxy.client.calls import Address, Call, Patience
from tokenproxy.client.errors import ProxyError
from tokenproxy.client.values import FeedRollout, FeedSelection

M = TypeVar("M", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")


def _blocking(make: Callable[P, Call[T]]) -> Callable[Concatenate["Client", P], T]:
    """The method of `Client` that sends the request of a function of `calls`."""

    def send(client: "Client", /, *args: P.args, **options: P.kwargs) -> T:
        return client._run(make(*args, **options))

    return _described(send, make)


def _awaited(make: Callable[P, Call[T]]) -> Callable[Concatenate["AsyncClient", P], Coroutine[Any, Any, T]]:
    """The same of `AsyncClient`."""

    async def send(client: "AsyncClient", /, *args: P.args, **options: P.kwargs) -> T:
        return await client._run(make(*args, **options))

    return _described(send, make)


def _described(method: M, make: Callable[..., Call[Any]]) -> M:
    """The method with the name, the parameters and the description of what makes its request."""
    shown = signature(make)
    own = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD), *shown.parameters.values()]
    result = get_args(shown.return_annotation)[0]
    update_wrapper(method, make)
    method.__signature__ = shown.replace(parameters=own, return_annotation=result)  # type: ignore[attr-defined]
    return method


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

    models = _blocking(calls.models)
    create_session = _blocking(calls.create_session)
    session = _blocking(calls.session)
    delete_session = _blocking(calls.delete_session)
    end_session = _blocking(calls.end_session)
    set_reward = _blocking(calls.set_reward)
    set_rewards = _blocking(calls.set_rewards)
    samples = _blocking(calls.samples)
    read_feed = _blocking(calls.read_feed)
    acknowledge = _blocking(calls.acknowledge)
    consumers = _blocking(calls.consumers)
    forget_consumer = _blocking(calls.forget_consumer)
    token_turn = _blocking(calls.token_turn)

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
            page = self._retry(calls.read_feed(consumer, after=after, wait_s=wait_s, **selection), patience_s)
            yield from page.data
            if acknowledge and page.cursor != after:
                self._retry(calls.acknowledge(consumer, page.cursor), patience_s)
            after = page.cursor

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

    models = _awaited(calls.models)
    create_session = _awaited(calls.create_session)
    session = _awaited(calls.session)
    delete_session = _awaited(calls.delete_session)
    end_session = _awaited(calls.end_session)
    set_reward = _awaited(calls.set_reward)
    set_rewards = _awaited(calls.set_rewards)
    samples = _awaited(calls.samples)
    read_feed = _awaited(calls.read_feed)
    acknowledge = _awaited(calls.acknowledge)
    consumers = _awaited(calls.consumers)
    forget_consumer = _awaited(calls.forget_consumer)
    token_turn = _awaited(calls.token_turn)

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
            page = await self._retry(
                calls.read_feed(consumer, after=after, wait_s=wait_s, **selection), patience_s
            )
            for rollout in page.data:
                yield rollout
            if acknowledge and page.cursor != after:
                await self._retry(calls.acknowledge(consumer, page.cursor), patience_s)
            after = page.cursor

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
