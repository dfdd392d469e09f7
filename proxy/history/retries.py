"""A request that is sent again is answered once: it gets the first answer, and no fork is made.

What counts as sent again:

- an `Idempotency-Key` that was seen. While its first request is being answered, by this process, others wait;
- `x-stainless-retry-count` above 0, which the OpenAI SDKs send, with a request equal to an earlier one. Equal
  requests are common (a group of rollouts begins with one prompt), so it takes the place of one that failed
  if any did, and else of the newest that was answered.

A failed request (an error, a client that left) leaves nothing to repeat: its retry runs anew.
"""

import asyncio
import hashlib
import zlib
from dataclasses import dataclass, field
from functools import cached_property

from proxy.errors import BadRequest
from proxy.history.store import Store, StoredResponse
from proxy.history.turn import new_id
from proxy.types import Headers

KEPT_BYTES = 4 * 2**20
"""Longer answers are not kept; their retries run anew."""
_SMALL = 16_384
"""Bytes that are digested and compressed on the event loop: sooner done than handed to a thread."""
_KEY, _COUNT, _AUTHORIZATION = b"idempotency-key", b"x-stainless-retry-count", b"authorization"


@dataclass
class Attempt:
    """One sending of a request. Clients with different credentials never get each other's answers."""

    headers: Headers
    body: bytes
    session: str | None

    @cached_property
    def named(self) -> bool:
        """Whether the client named it by an Idempotency-Key."""
        return bool(self._given(_KEY))

    @cached_property
    def again(self) -> bool:
        """Whether the client says that it sent this before."""
        return self._given(_COUNT).strip() not in (b"", b"0")

    @cached_property
    def key(self) -> bytes:
        """What its answer is kept under: 16 bytes."""
        if not self.named:
            return self.request
        name = self._given(_KEY) + b"\0" + self._given(_AUTHORIZATION)
        return hashlib.blake2b(name, digest_size=16, person=b"named").digest()

    @cached_property
    def request(self) -> bytes:
        """Digest of everything that was asked: 16 bytes. A millisecond for a megabyte."""
        request = hashlib.blake2b(digest_size=16, person=b"request")
        for part in (self._given(_AUTHORIZATION), (self.session or "").encode(), self.body):
            request.update(len(part).to_bytes(8, "little") + part)
        return request.digest()

    def _given(self, header: bytes) -> bytes:
        return next((value for name, value in self.headers if name == header), b"")


@dataclass(frozen=True, slots=True)
class Replay:
    """An answer that was given before."""

    status: int
    headers: Headers
    body: bytes


@dataclass
class Retries:
    """Finds earlier answers, and keeps new ones. One per application."""

    store: Store
    _running: dict[bytes, asyncio.Event] = field(default_factory=dict)

    async def begin(self, attempt: Attempt) -> Replay | None:
        """The answer that an equal request got before; None if this one is to run.

        Whoever gets None must call `done`, `failed` or `abandon`.

        Raises:
            BadRequest: the Idempotency-Key was used for another request.
            StoreError: the store does not answer.
        """
        if attempt.named:
            while (running := self._running.get(attempt.key)) is not None:
                await running.wait()
            self._running[attempt.key] = asyncio.Event()
        replay: Replay | None = None
        try:
            if attempt.named or attempt.again:
                replay = await self._earlier(attempt)
        except BaseException:
            self._release(attempt)
            raise
        if replay is not None:
            self._release(attempt)
        return replay

    async def done(self, attempt: Attempt, status: int, headers: Headers, body: bytes) -> None:
        """Keep an answer. Raises StoreError."""

        def make() -> StoredResponse:
            return StoredResponse(
                id=new_id(),
                key=attempt.key,
                request=attempt.request,
                status=status,
                headers=tuple(headers),
                body=zlib.compress(body, 1),
            )

        try:
            if len(body) <= KEPT_BYTES:
                small = len(body) + len(attempt.body) < _SMALL
                await self.store.keep_response(make() if small else await asyncio.to_thread(make))
        finally:
            self._release(attempt)

    def abandon(self, attempt: Attempt) -> None:
        """The request was refused: there is nothing to repeat, and nothing that would go better."""
        self._release(attempt)

    async def failed(self, attempt: Attempt) -> None:
        """Remember that a request got no answer worth keeping. Raises StoreError."""
        self._release(attempt)
        if not attempt.named:
            answer = StoredResponse(id=new_id(), key=attempt.key, request=attempt.request, failed=True)
            await self.store.keep_response(answer)

    async def _earlier(self, attempt: Attempt) -> Replay | None:
        answers = await self.store.answers(attempt.key)
        if attempt.named and answers and answers[0].request != attempt.request:
            raise BadRequest(
                "this `Idempotency-Key` was used for another request: send a new key with a new request",
                param="Idempotency-Key",
            )
        for answer in answers:
            if answer.failed and await self.store.take_response(answer):
                return None
        given = next((answer for answer in answers if not answer.failed), None)
        if given is None:
            return None
        body = await asyncio.to_thread(zlib.decompress, given.body)
        return Replay(given.status, list(given.headers), body)

    def _release(self, attempt: Attempt) -> None:
        running = self._running.pop(attempt.key, None) if attempt.named else None
        if running is not None:
            running.set()
