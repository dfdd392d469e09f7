"""Keys that agents get for one session each: signed, so that no turn with one waits for the store.

    key = "tps-" + base64url(content | signature)
    content = MessagePack of [tenant, session, generation, expiry]
    signature = HMAC-SHA256(secret, "session key" | 0 | content), its first 16 bytes

The secret belongs to the store, so every process that shares it reads the keys of the others. A key ends
when its session is finished by a reward or by its end, or is deleted: that raises the session's generation in
the store. The process that does so knows at once. Others read, all together and between the turns, the
generations of the sessions whose keys they saw. Times are not compared, because the clocks of two machines
differ.
"""

import asyncio
import base64
import binascii
import hmac
import time
from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec

from chat_tokenizer.cache import BoundedCache
from tokenproxy.base.errors import EngineUnavailable, Unauthorized
from tokenproxy.record.echo import Signer
from tokenproxy.record.store import Store, StoreError, session_id

PREFIX = b"tps-"
DEFAULT_S, LONGEST_S = 86_400, 30 * 86_400
"""Seconds until a key expires."""
LEEWAY_S = 300
"""Seconds that the clocks of two machines may differ."""
WATCH_S = 20.0
"""Seconds between two readings of the generations."""
_SPACE = "session-keys"
_SIGNATURE_BYTES = 16
_TRIES = 64
"""How often a generation is raised again because another process changed it at the same time."""


class SessionKey(msgspec.Struct, frozen=True, array_like=True):
    """What a key grants: turns of one session."""

    tenant: str
    session: str
    """Its name."""
    generation: Annotated[int, msgspec.Meta(ge=0)]
    expires: float
    """Seconds since the epoch."""


_decode = msgspec.msgpack.Decoder(SessionKey).decode


class SessionKeys:
    """Makes, reads and ends keys. One per application."""

    def __init__(
        self,
        store: Store,
        signer: Callable[[], Awaitable[Signer | None]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`signer`: `Echoes.signer`."""
        self._store = store
        self._make_signer = signer
        self._clock = clock
        self._signer: Signer | None = None
        self._verified: BoundedCache[bytes, SessionKey] = BoundedCache(4096)
        self._seen: set[str] = set()
        """Rollouts whose keys were read since the last look at their generations."""
        self._generations: BoundedCache[str, int] = BoundedCache(100_000)
        """Of rollouts of which keys ended."""

    async def issue(self, tenant: str, session: str, seconds: float = DEFAULT_S) -> str:
        """A key for a session that expires in so many seconds. Raises StoreError."""
        signer = await self._signs()
        generation = await self._advance(session_id(tenant, session), 0)
        key = SessionKey(tenant, session, generation, self._clock() + seconds)
        content = msgspec.msgpack.encode(key)
        signature = signer.signature(content)[:_SIGNATURE_BYTES]
        return (PREFIX + base64.urlsafe_b64encode(content + signature).rstrip(b"=")).decode()

    def read(self, key: bytes) -> SessionKey | None:
        """What a key grants; None if the proxy did not make it.

        Raises:
            Unauthorized: it has expired, or its session was finished or deleted.
            EngineUnavailable: this process could not read the secret from the store yet.
        """
        if not key.startswith(PREFIX):
            return None
        if (found := self._verified.get(key)) is None:
            if (found := self._verify(key)) is None:
                return None
            self._verified.put(key, found)
        self.check(found)
        return found

    def check(self, found: SessionKey) -> None:
        """Raises Unauthorized, as `read`."""
        if self._clock() > found.expires + LEEWAY_S:
            raise Unauthorized(f"the key of the session {found.session!r} has expired", code="key_expired")
        rollout = session_id(found.tenant, found.session)
        self._seen.add(rollout)
        if found.generation < (self._generations.get(rollout) or 0):
            raise Unauthorized(
                f"the session {found.session!r} was finished or deleted, which ended this key of it",
                code="session_ended",
            )

    def _verify(self, key: bytes) -> SessionKey | None:
        if self._signer is None:
            raise EngineUnavailable("the store does not respond, without which no key of a session is read")
        encoded = key.removeprefix(PREFIX)
        try:
            data = base64.b64decode(encoded + b"=" * (-len(encoded) % 4), b"-_", validate=True)
            content, signature = data[:-_SIGNATURE_BYTES], data[-_SIGNATURE_BYTES:]
            if not hmac.compare_digest(signature, self._signer.signature(content)[:_SIGNATURE_BYTES]):
                return None
            return _decode(content)
        except (binascii.Error, msgspec.DecodeError):
            return None

    async def end(self, rollout: str) -> None:
        """End all keys of a rollout. Raises StoreError.

        A store that was lost holds no generation of a key that lives: so it is raised in any case.
        """
        self._generations.put(rollout, await self._advance(rollout, 1))

    async def refresh(self) -> None:
        """Read the secret if it is not known yet, and the generations of sessions whose keys were used."""
        self._signer = self._signer or await self._make_signer()
        seen, self._seen = self._seen, set()
        try:
            found = await self._store.get(_SPACE, list(seen)) if seen else {}
        except StoreError:
            self._seen |= seen
            raise
        for rollout, generation in found.items():
            if int(generation):
                self._generations.put(rollout, int(generation))

    async def watch(self) -> None:
        """Wait, then `refresh`."""
        await asyncio.sleep(WATCH_S)
        await self.refresh()

    async def _signs(self) -> Signer:
        self._signer = self._signer or await self._make_signer()
        if self._signer is None:
            raise StoreError("the secret of the keys of sessions cannot be read")
        return self._signer

    async def _advance(self, rollout: str, by: int) -> int:
        """Raise the generation of a rollout, kept for as long as a key may live; returns the new one."""
        for _ in range(_TRIES):
            before = (await self._store.get(_SPACE, [rollout])).get(rollout)
            generation = max(int(before or 0) + by, int(self._clock() * 1e6) if by else 0)
            kept = LONGEST_S + 2 * LEEWAY_S
            if await self._store.put(_SPACE, rollout, b"%d" % generation, keep_s=kept, before=before):
                return generation
        raise StoreError(f"the keys of {rollout} are changed by too many requests at once")
