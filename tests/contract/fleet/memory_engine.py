"""A fleet on engines without sockets, for tests in which time is stepped."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from chat_tokenizer import ChatTokenizer
from tests.support.stepped import now, settled
from tokenproxy.base.errors import ApiError, EngineBroken, EngineUnavailable, Unsupported
from tokenproxy.base.http import JSON_HEADERS, BytesResponse, Request, Response
from tokenproxy.engine.discovery import Model
from tokenproxy.engine.protocol import Engine
from tokenproxy.fleet.choosing import Routing
from tokenproxy.fleet.fleet import Fleet
from tokenproxy.fleet.replica import Replica
from tokenproxy.fleet.tokenizers import Tokenizers
from tokenproxy.monitoring.metrics import Metrics

CHAT = "/v1/chat/completions"
EVENTS = [b'data: {"choices": []}\n\n', b"data: [DONE]\n\n"]
Answer = Callable[[], Awaitable[Response]]


def answers(status: int = 200, body: bytes = b"{}", kind: bytes = b"application/json") -> Answer:
    """Answers at once; a body that is an event stream comes in one piece."""

    async def answer() -> Response:
        return BytesResponse(status, [(b"content-type", kind)], body)

    return answer


def fails(error: ApiError) -> Answer:
    async def answer() -> Response:
        raise error

    return answer


def waits(until: asyncio.Event | float, then: Answer | None = None) -> Answer:
    """Answers after so many seconds, or when an event is set."""

    async def answer() -> Response:
        await (until.wait() if isinstance(until, asyncio.Event) else asyncio.sleep(until))
        return await (then or answers())()

    return answer


def streams(gap_s: float = 0.0, error: ApiError | None = None, events: Sequence[bytes] = EVENTS) -> Answer:
    """Answers with events; the next one comes after a gap, and an error after the last but one."""

    async def answer() -> Response:
        return _Stream(gap_s, error, events)

    return answer


class _Stream:
    status = 200

    def __init__(self, gap_s: float, error: ApiError | None, events: Sequence[bytes]) -> None:
        self.headers = [(b"content-type", b"text/event-stream")]
        self._gap_s, self._error, self._events = gap_s, error, events

    async def chunks(self) -> AsyncIterator[bytes]:
        for position, event in enumerate(self._events):
            if position:
                await asyncio.sleep(self._gap_s)
                if self._error is not None:
                    raise self._error
            yield event

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def aclose(self) -> None:
        """Nothing to close."""


class MemoryEngine:
    """An engine that answers as a test sets its fields."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model = "tiny"
        self.gone: ApiError | None = None
        """What every request raises, if nothing listens any more."""
        self.health: int | ApiError = 200
        self.hangs: set[str] = set()
        """Routes that never answer."""
        self.takes_ids = True
        self.grows = False
        """Whether its metrics show that it samples tokens."""
        self.requires: tuple[bytes, bytes] | None = None
        """The header without which it describes itself to nobody."""
        self.describes: Callable[[str], Response | None] = lambda path: None
        """Its answers to questions about it, where they are not the usual ones."""
        self.replies: list[Answer] = []
        """Answers to the next completions."""
        self.usual: Answer = answers()
        """The answer to all others."""
        self.asked: list[Request] = []
        self.started = 0
        """Number of completions that clients asked for."""

    async def send(self, request: Request) -> Response:
        """See `Engine.send`."""
        self.asked.append(request)
        await asyncio.sleep(0)
        if self.gone is not None:
            raise self.gone
        path = request.path.partition("?")[0]
        client = path == CHAT and not _is_probe(request)
        self.started += client
        if path in self.hangs:
            await asyncio.Event().wait()
        if client:
            return await (self.replies.pop(0) if self.replies else self.usual)()
        if path == "/health":
            if isinstance(self.health, ApiError):
                raise self.health
            return BytesResponse(self.health, [], b"")
        if self.requires is not None and self.requires not in request.headers:
            return BytesResponse(401, [], b"")
        if (own := self.describes(path)) is not None:
            return own
        if path == "/v1/models":
            return _json({"data": [{"id": self.model, "root": self.model}]})
        if path == "/metrics":
            count = len(self.asked) if self.grows else 0
            return BytesResponse(200, [], b"vllm:generation_tokens_total %d.0\n" % count)
        if path == CHAT:
            ids = (json.loads(request.body).get("kv_transfer_params") or {}).get("prompt_token_ids")
            return _json({"prompt_token_ids": ids if self.takes_ids else [7]})
        return BytesResponse(404, [], b"")

    def verify(self, verify: Callable[[], Awaitable[None]] | None) -> None:
        """See `Engine.verify`."""

    async def aclose(self) -> None:
        """See `Engine.aclose`."""


def _json(answer: Any) -> Response:
    return BytesResponse(200, list(JSON_HEADERS), json.dumps(answer).encode())


def _is_probe(request: Request) -> bool:
    return request.path == CHAT and b'"max_tokens":1,' in request.body.replace(b" ", b"").replace(b"}", b",")


class _NoTokenizers(Tokenizers):
    async def find(self, engine: Engine, model: Model | None) -> ChatTokenizer:
        raise Unsupported("no tokenizer here")


def in_order(replicas: Sequence[Replica], holder: str, conversations: Callable[[str], int]) -> Replica:
    """The choice of these tests: the first replica of the fleet."""
    return replicas[0]


def replica_of(
    engine: MemoryEngine, interval_s: float = 5.0, tokenizers: Tokenizers | None = None
) -> Replica:
    return Replica(engine, tokenizers or _NoTokenizers(), Metrics(), interval_s, clock=now)


@asynccontextmanager
async def fleet_of(*engines: MemoryEngine, interval_s: float = 5.0, **options: Any) -> AsyncIterator[Fleet]:
    """A fleet that runs, and knows its engines."""
    replicas = [replica_of(engine, interval_s) for engine in engines]
    fleet = Fleet(replicas, options.pop("choose", in_order), clock=now, **options)
    fleet.start()
    await settled()
    try:
        yield fleet
    finally:
        await fleet.stop()


def engines(count: int) -> list[MemoryEngine]:
    return [MemoryEngine(f"http://engine-{number}:8000") for number in range(count)]


async def ask(fleet: Fleet, text: str = "Hi", **routing: Any) -> tuple[int, bytes]:
    """Status and body of a completion."""
    body = json.dumps({"messages": text}).encode()
    request = Request("POST", CHAT, [], body)
    facts = {"ids": 10, "completion": True, "digest": lambda: body, **routing}
    response = await fleet.send(lambda replica: replica.engine.send(request), Routing(**facts))
    try:
        return response.status, await response.read()
    finally:
        await response.aclose()


def gone(engine: MemoryEngine) -> None:
    """Nothing listens at the address of an engine any more."""
    engine.gone = EngineUnavailable(f"no engine responds at {engine.name}")


def broken() -> EngineBroken:
    return EngineBroken("the engine closed the connection")
