"""`/v1/samples`: the samples of finished rollouts, for trainers that read them as they come.

`after` only chooses where to read. What a consumer has processed it acknowledges with a request of its own,
so that one that reads ahead and is killed gets the rest again.

Samples are made in threads of asyncio's own, not in those of the encoders, for which turns would wait.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tokenproxy.base.errors import BadRequest, NotFound
from tokenproxy.base.fields import parse, read
from tokenproxy.base.http import Request, Response, json_response
from tokenproxy.monitoring.exchange import waiting
from tokenproxy.record import feed
from tokenproxy.record.feed import MOST_CONSUMERS, Consumer
from tokenproxy.record.store import LAST_POSITION, Store
from tokenproxy.samples.feed import (
    FeedFilter,
    FeedStep,
    ReadRollout,
    cursor_position,
    metadata_condition,
    read_step,
)
from tokenproxy.samples.layouts import Layout
from tokenproxy.samples.turn_json import stored_json
from tokenproxy.turn.services import Services
from tokenproxy.web.base import StoreRoute
from tokenproxy.web.gate import check_page
from tokenproxy.web.keys import KeyScope
from tokenproxy.web.parameters import Query, check_name, refused_as

MOST_ROLLOUTS = 1000
LONGEST_WAIT_S = 300.0

_MAY_BE_EMPTY = ("consumer", "after")
"""Parameters that count as missing if they are empty."""
_PARAMETERS = (
    *_MAY_BE_EMPTY,
    *("wait", "limit", "metadata", "weight_version", "class", "on_policy", "layout", "shared"),
)
_STOP_CHECK_S = 0.5
"""Seconds after which a request that waits looks whether the proxy stops."""
_NOTED_S = 60.0
"""Seconds after which the store notes again that a consumer reads. Silent consumers are forgotten."""


class FeedSamples(StoreRoute):
    """Returns the samples of finished rollouts, in the order of finishing."""

    path = "/v1/samples"
    methods = ("GET",)
    summary = "The samples of finished rollouts, in the order of finishing"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`?consumer=&after=&wait=&limit=&metadata=&weight_version=&class=&on_policy=&layout=&shared=`.

        `{"object", "data": [{"rollout", "revision", "cause", "finished", "metadata", "samples", "refused",
        "cursor"}], "cursor", "more"}`. Waits up to `wait` seconds until there is a rollout. Reads after
        `after`, else after what the consumer acknowledged, else from the beginning.
        """
        query = Query(request, _PARAMETERS, several=("metadata", "weight_version", "class"))
        for empty in query.empty():
            if empty not in _MAY_BE_EMPTY:  # a filter must not be ignored
                raise BadRequest.of(empty, "must have a value")
        store, tenant = services.store, request.tenant
        consumer, after = query.text("consumer"), query.text("after")
        limit, wait_s = query.limit(16, MOST_ROLLOUTS), query.number("wait", "0")
        if not 0 <= wait_s <= LONGEST_WAIT_S:
            raise BadRequest.of("wait", f"must be between 0 and {LONGEST_WAIT_S:g} seconds")
        selected, layout = _filter(query, tenant), query.layout()
        name = check_name(consumer, "consumer") if consumer else ""
        start = _position(after, "after") if after else None
        if name and not tenant:  # the store remembers it
            origins = [origin.encode() for origin in services.settings.cors_origins]
            check_page(dict(request.headers), origins, links=False)
        deadline = time.monotonic() + wait_s
        if name:
            acknowledged = await _register(store, tenant, name)
            start = acknowledged if start is None else start

        def read(position: int) -> Awaitable[FeedStep]:
            return read_step(store, position, limit, selected)

        step = await _read_or_wait(read, start or 0, deadline, tenant, services)
        data = await asyncio.to_thread(lambda: [_shown(rollout, layout) for rollout in step.rollouts])
        return json_response(
            {"object": "list", "data": data, "cursor": str(step.position), "more": step.more}
        )


class FeedAcknowledge(StoreRoute):
    """Notes how far a consumer has processed the feed."""

    path = "/v1/samples/ack"
    methods = ("POST",)
    summary = "Acknowledge the samples of finished rollouts up to a cursor"
    key_scope = KeyScope.READ  # who may read may note how far

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`{"consumer", "cursor"}`; returns both, with the cursor that is acknowledged now."""
        fields, store = parse(request.body), services.store
        consumer, cursor = read(fields, "consumer", str), read(fields, "cursor", str)
        if consumer is None:
            raise BadRequest.of("consumer", "is required: the name with which it reads")
        if cursor is None:
            raise BadRequest.of("cursor", "is required: that of the last rollout you processed")
        name, position = check_name(consumer, "consumer"), _position(cursor, "cursor")
        acknowledged = await _acknowledge(store, request.tenant, name, position)
        return json_response({"consumer": name, "cursor": str(acknowledged)})


class FeedConsumers(StoreRoute):
    """Lists the consumers of the feed."""

    path = "/v1/samples/consumers"
    methods = ("GET",)
    summary = "The consumers of finished rollouts, and how far each has read"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`{"object", "data": [{"consumer", "cursor", "waiting", "oldest"}]}`; `oldest` in seconds."""
        found = await feed.consumers(services.store, request.tenant)
        return json_response({"object": "list", "data": [_described(consumer) for consumer in found]})


class OneFeedConsumer(StoreRoute):
    """Removes a consumer of the feed."""

    path = "/v1/samples/consumers/{consumer}"
    methods = ("DELETE",)
    summary = "Remove a consumer of finished rollouts"
    key_scope = KeyScope.READ

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`{"consumer", "deleted"}`. If it reads again, it begins at the beginning."""
        name = check_name(request.parameters["consumer"], "consumer")
        if not await feed.forget(services.store, request.tenant, name):
            raise NotFound(
                f"unknown consumer {name!r}: it never read, or was removed",
                param="consumer",
                code="consumer_not_found",
            )
        return json_response({"consumer": name, "deleted": True})


def _filter(query: Query, tenant: str) -> FeedFilter:
    """The rollouts and samples that a request selects. Raises BadRequest."""
    with refused_as("metadata", "`metadata` must be KEY=VALUE, as metadata=env%3Dmath"):
        metadata = tuple(map(metadata_condition, query.values("metadata")))
    weights = frozenset(query.values("weight_version"))
    return FeedFilter(tenant, metadata, weights, query.selection())


def _position(cursor: str, param: str) -> int:
    with refused_as(param, f"`{param}` must be a cursor that /v1/samples returned, or 0"):
        return cursor_position(cursor)


async def _read_or_wait(
    read: Callable[[int], Awaitable[FeedStep]], start: int, deadline: float, tenant: str, services: Services
) -> FeedStep:
    """The first step after a position that finds a rollout; the last one before the time is over or the
    proxy stops."""
    store, watch = services.store, services.history.feed_watch
    end = (await store.feed(LAST_POSITION, limit=0)).end
    # a store that was lost may have given greater positions
    position = min(start, (await store.feed(LAST_POSITION, limit=0, tenant=tenant)).end)
    while True:
        step = await read(position)
        if step.rollouts:
            return step
        position = step.position
        grown = step.more
        while not grown:
            left = deadline - time.monotonic()
            if left <= 0 or services.running.stopping:
                return step
            with waiting():
                grown = await watch.wait(end, min(left, _STOP_CHECK_S))
        if time.monotonic() > deadline:
            return step
        end = (await store.feed(LAST_POSITION, limit=0)).end


async def _register(store: Store, tenant: str, name: str) -> int:
    """The position that a consumer acknowledged. It is registered when it reads for the first time."""
    acknowledged = await feed.acknowledged(store, tenant, name)
    if acknowledged is None or abs(time.time() - acknowledged.at) > _NOTED_S:
        return await _acknowledge(store, tenant, name, 0)
    return acknowledged.position


async def _acknowledge(store: Store, tenant: str, name: str, position: int) -> int:
    """See `feed.acknowledge`. Raises BadRequest if the tenant has too many consumers."""
    acknowledged = await feed.acknowledge(store, tenant, name, position)
    if acknowledged is None:
        raise BadRequest(
            f"there are {MOST_CONSUMERS} consumers: remove one with DELETE /v1/samples/consumers/NAME",
            param="consumer",
            code="too_many_consumers",
        )
    return acknowledged


def _shown(rollout: ReadRollout, layout: Layout) -> msgspec.Raw:
    session = rollout.session
    return msgspec.Raw(
        msgspec.json.encode(
            {
                "rollout": session.name,
                "revision": session.revision,
                "cause": session.cause,
                "finished": session.position / 1e6,
                "metadata": stored_json(session.metadata, b"{}"),
                "samples": [layout.row(sample) for sample in rollout.samples],
                "refused": rollout.refused,
                "cursor": str(session.position),
            }
        )
    )


def _described(consumer: Consumer) -> dict[str, Any]:
    return {
        "consumer": consumer.name,
        "cursor": str(consumer.position),
        "waiting": consumer.waiting,
        "oldest": consumer.oldest / 1e6 if consumer.waiting else None,
    }
