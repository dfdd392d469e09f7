"""A request that is sent again is answered once: it gets the first response, and no fork is made.

A request counts as sent again if

- its `Idempotency-Key` was used before. While the first such request runs in this process, others wait;
- it names a session and has `x-stainless-retry-count` above 0, which the OpenAI SDKs send, and an equal
  request of that session came before. Without a session equal requests are common (a group of rollouts begins
  with one prompt), so such a request runs.

A failed request (an error, a client that left) leaves nothing to repeat: its retry runs. Responses are kept
only where a retry can come: for requests with an `Idempotency-Key`, or with a session and
`x-stainless-retry-count`.
"""

import asyncio
import hashlib
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType

import msgspec

from tokenproxy.base.errors import ApiError, BadRequest
from tokenproxy.base.request import ChatRequest
from tokenproxy.base.types import Headers
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.claims import Tasks
from tokenproxy.record.store import RESPONSES, Store, StoreError

KEPT_BYTES = 4 * 2**20
"""Longer responses are not kept; their retries run."""
_RETRIED_BY_SDKS = frozenset({408, 409, 429})
"""Statuses below 500 after which SDKs send a request again."""


_MOST_FAILURES = 8
"""Failures of equal requests that are remembered at once."""


class EarlierResponse(msgspec.Struct, frozen=True, array_like=True):
    """The response that an equal request got before: a value of the space `RESPONSES`."""

    request: bytes
    """Digest of the whole request."""
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class _State(Enum):
    RUNNING = "running"
    HANDED_OVER = "handed over"
    """A stream settles it later."""
    SETTLED = "settled"


class Attempt:
    """One sending of a request: running, then settled once by `keep` or `fail`.

    As a block, `async with` it: where an equal request got a response, that is `earlier`. If the block fails,
    or the client leaves, no response is kept.
    """

    def __init__(self, retries: "Retries", request: ChatRequest) -> None:
        signs = request.retry
        self.named = bool(signs.idempotency_key)
        """Whether the client named the request by an Idempotency-Key."""
        self.retriable = self.named or (request.session is not None and bool(signs.retry_count))
        """Whether a retry of the request could be recognised."""
        count = signs.retry_count.strip()
        # not read as an integer: Python refuses one of thousands of digits
        positive = count.isdigit() and count.strip(b"0") != b""
        self.again = self.named or (self.retriable and positive)
        """Whether the request may have been sent before."""
        self.earlier: EarlierResponse | None = None
        self._retries = retries
        self._state = _State.RUNNING
        if self.retriable:
            session = request.session.name if request.session else ""
            scope = (request.tenant.encode(), session.encode(), signs.path.encode())
            self.digest = _digest(b"request", *scope, signs.body)
            key = _digest(b"named", *scope[:1], signs.idempotency_key) if self.named else self.digest
            self.key = key.hex()

    async def __aenter__(self) -> "Attempt":
        """Raises BadRequest: the Idempotency-Key was used for another request."""
        if self.retriable:
            await self._retries.look_up(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ApiError):
            await self.fail(error.status)
        elif error is not None or self._state is _State.RUNNING:
            # after a cancellation too: repeats of the request wait for the end of this attempt
            self.abandon()

    def hand_over(self) -> "Attempt":
        """Let a stream settle the attempt after the request's block has ended."""
        if self._state is _State.RUNNING:
            self._state = _State.HANDED_OVER
        return self

    @property
    def wants_body(self) -> bool:
        """Whether to keep the response when it is complete."""
        return self.retriable and self._state is not _State.SETTLED

    async def keep(self, status: int, headers: Headers, body: bytes) -> None:
        """Keep a complete response, so that a retry gets the same."""
        if not self._settle():
            return
        try:
            if len(body) <= KEPT_BYTES:
                await self._retries.keep(self, status, headers, body)
        finally:
            self._retries.finished(self)

    async def fail(self, status: int) -> None:
        """Settle the attempt with an error. If SDKs retry on it, the store remembers it for the retry."""
        if not self._settle():
            return
        try:
            if not self.named and (status >= 500 or status in _RETRIED_BY_SDKS):
                await self._retries.remember_failure(self)
        finally:
            self._retries.finished(self)

    def abandon(self) -> None:
        """Settle the attempt without a response, because the client left or the engine's stream broke."""
        if self._settle():
            self._retries.finished(self)
            if not self.named:
                self._retries.tasks.finish_later(self._retries.remember_failure(self))

    def _settle(self) -> bool:
        """Settle the attempt; False if it was settled already or cannot be retried."""
        open_, self._state = self._state is not _State.SETTLED, _State.SETTLED
        return open_ and self.retriable


@dataclass
class Retries:
    """Finds earlier responses, and keeps new ones. One per application."""

    store: Store
    metrics: Metrics
    tasks: Tasks
    _running: dict[str, asyncio.Event] = field(default_factory=dict)

    async def keep(self, attempt: Attempt, status: int, headers: Headers, body: bytes) -> None:
        """Store a response. A store that does not respond is logged."""
        response = EarlierResponse(attempt.digest, status, tuple(headers), body)
        try:
            value = msgspec.msgpack.encode(response)
            await self.store.put(RESPONSES, attempt.key, value, keep_s=self.store.limits.response_age_s)
        except StoreError as error:
            error.report(self.metrics, "a response was not kept for a retry")

    async def remember_failure(self, attempt: Attempt) -> None:
        """Store that a request got no response to repeat: each failure lets one retry run."""
        keep_s = self.store.limits.response_age_s
        try:
            for number in range(_MOST_FAILURES):
                name = f"{attempt.key}/{number}"
                if await self.store.put(RESPONSES, name, b"", keep_s=keep_s, before=None):
                    return
        except StoreError as error:
            error.report(self.metrics, "a failed request was not remembered")

    def finished(self, attempt: Attempt) -> None:
        """Wake the requests that wait with the same Idempotency-Key."""
        event = self._running.pop(attempt.key, None) if attempt.named else None
        if event is not None:
            event.set()

    async def look_up(self, attempt: Attempt) -> None:
        """Find the earlier response to an equal request; wait for one that runs with the same key.

        Raises:
            BadRequest: the Idempotency-Key was used for another request.
        """
        if attempt.named:
            while (running := self._running.get(attempt.key)) is not None:
                await running.wait()
            self._running[attempt.key] = asyncio.Event()
        try:
            attempt.earlier = await self._earlier(attempt) if attempt.again else None
        except StoreError as error:
            error.report(self.metrics, "a retry cannot be told from a new request")
        except BaseException:  # cancellation too: repeats of the request wait for the end of this attempt
            self.finished(attempt)
            raise
        if attempt.earlier is not None:
            self.metrics.retries.labels("answered_again").inc()
            attempt._settle()
            self.finished(attempt)
        elif attempt.again:
            self.metrics.retries.labels("run_anew").inc()

    async def _earlier(self, attempt: Attempt) -> EarlierResponse | None:
        names = [attempt.key, *(f"{attempt.key}/{number}" for number in range(_MOST_FAILURES))]
        values = await self.store.get(RESPONSES, names)
        value = values.get(attempt.key)
        found = None if value is None else msgspec.msgpack.decode(value, type=EarlierResponse)
        if attempt.named and found is not None and found.request != attempt.digest:
            raise BadRequest(
                "this `Idempotency-Key` was used for another request: send a new key with a new request",
                param="Idempotency-Key",
            )
        for name in names[1:]:
            if name in values and await self.store.take(RESPONSES, name) is not None:
                return None
        return found


def _digest(kind: bytes, *parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16, person=kind)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
