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
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from tokenproxy.base.errors import ApiError, BadRequest, Conflict
from tokenproxy.base.request import ChatRequest
from tokenproxy.base.types import Headers
from tokenproxy.record.store import RESPONSES, StoreError

if TYPE_CHECKING:
    from tokenproxy.record.history import History

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


_decode = msgspec.msgpack.Decoder(EarlierResponse).decode


class Attempt:
    """One sending of a request: running, then settled once by `keep` or `fail`.

    As a block, `async with` it: where an equal request got a response, that is `earlier`. If the block fails,
    or the client leaves, no response is kept.
    """

    def __init__(self, history: "History", request: ChatRequest) -> None:
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
        self._checks_again = request.must_record
        """Whether it must not run after it waited: what was checked before, its key, may have ended."""
        self._history = history
        self._settled = not self.retriable
        if self.retriable:
            session = request.session.name if request.session else ""
            scope = (request.tenant.encode(), session.encode(), signs.path.encode())
            self._digest = _digest(b"request", *scope, signs.body)
            key = _digest(b"named", *scope[:2], signs.idempotency_key) if self.named else self._digest
            self._key = key.hex()

    async def __aenter__(self) -> "Attempt":
        """Find the earlier response to an equal request; wait for one that runs with the same key.

        Raises:
            BadRequest: the Idempotency-Key was used for another request.
            Conflict: it waited for an equal request that failed, and is to be sent again.
        """
        if not self.again:
            return self
        history, waited = self._history, False
        if self.named:
            while (running := history.named.get(self._key)) is not None:
                await running.wait()
                waited = True
            history.named[self._key] = asyncio.Event()
        try:
            self.earlier = await self._earlier()
        except StoreError as error:
            error.report(history.metrics, "a retry cannot be told from a new request")
        except BaseException:  # cancellation too: repeats of the request wait for the end of this attempt
            self._end()
            raise
        if self.earlier is not None or (waited and self._checks_again):
            self._end()
        if self.earlier is None and waited and self._checks_again:
            raise Conflict("an equal request ran until now and got no response: send this one again")
        history.metrics.retries.labels("answered_again" if self.earlier is not None else "run_anew").inc()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ApiError):
            await self.fail(error.status)
        elif not self._settled:
            # the client left, or the engine's stream broke
            self._end()
            if not self.named:
                self._history.tasks.finish(self._remember_failure())

    async def keep(self, status: int, headers: Headers, body: bytes) -> None:
        """Keep a complete response, so that a retry gets the same."""
        if self._settled:
            return
        self._settled, history = True, self._history
        try:
            if len(body) <= KEPT_BYTES:
                value = msgspec.msgpack.encode(EarlierResponse(self._digest, status, tuple(headers), body))
                keep_s = history.store.limits.response_age_s
                await history.store.put(RESPONSES, self._key, value, keep_s=keep_s)
        except StoreError as error:
            error.report(history.metrics, "a response was not kept for a retry")
        finally:
            self._end()

    async def fail(self, status: int) -> None:
        """Settle the attempt with an error. If SDKs retry on it, the store remembers it for the retry."""
        if self._settled:
            return
        self._settled = True
        try:
            if not self.named and (status >= 500 or status in _RETRIED_BY_SDKS):
                await self._remember_failure()
        finally:
            self._end()

    def _end(self) -> None:
        """Wake the requests that wait with the same Idempotency-Key."""
        self._settled = True
        if self.named:
            self._history.named.pop(self._key).set()

    async def _remember_failure(self) -> None:
        """Store that a request got no response to repeat: each failure lets one retry run."""
        store = self._history.store
        try:
            for number in range(_MOST_FAILURES):
                name, keep_s = f"{self._key}/{number}", store.limits.response_age_s
                if await store.put(RESPONSES, name, b"", keep_s=keep_s, before=None):
                    return
        except StoreError as error:
            error.report(self._history.metrics, "a failed request was not remembered")

    async def _earlier(self) -> EarlierResponse | None:
        history, names = self._history, [self._key, *(f"{self._key}/{n}" for n in range(_MOST_FAILURES))]
        values = await history.store.get(RESPONSES, names)
        value = values.get(self._key)
        unreadable = history.store.unreadable
        found = None if value is None else unreadable.read(f"{RESPONSES} {self._key}", _decode, value)
        if self.named and found is not None and found.request != self._digest:
            raise BadRequest(
                "this `Idempotency-Key` was used for another request: send a new key with a new request",
                param="Idempotency-Key",
            )
        for name in names[1:]:
            if name in values and await history.store.put(RESPONSES, name, None):
                return None
        return found


def _digest(kind: bytes, *parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16, person=kind)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
