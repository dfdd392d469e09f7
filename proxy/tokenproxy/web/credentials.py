"""Identifies the tenant of a request. A tenant is a digest of a verified credential.

A tenant cannot continue, list, read, reward or delete what another tenant recorded. If neither proxy nor
engine requires credentials, all clients are one tenant, the empty string.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from hashlib import blake2b

from tokenproxy.base.errors import ApiError, EngineBroken, EngineTimeout, EngineUnavailable, Unauthorized
from tokenproxy.base.http import Request, Response, read_and_close
from tokenproxy.base.tasks import end_tasks
from tokenproxy.base.types import Headers, Scope
from tokenproxy.record.store import Store

TENANT_KEY = "tokenproxy.tenant"
"""Key of the ASGI scope with the tenant of a request, set after one of the proxy's own keys was verified."""
SINGLE_TENANT = ""

OPEN_S = 60.0
"""How long the result counts whether the engine requires credentials at all."""
ACCEPTED_S = 300.0
REFUSED_S = 10.0
REMEMBERED = 4096
"""Number of credentials with a cached verdict; the least recently used are dropped first."""
TIMEOUT_S = 60.0
LAST_WORD_S = 2.0
"""How long a verdict is waited for where there was one before, which counts after that."""

_MODELS_PATH = "/v1/models"
_CREDENTIAL_HEADERS = (b"authorization", b"x-api-key")

TenantOf = Callable[[Scope], Awaitable[str]]
"""Returns the tenant of a request. Raises Unauthorized, or ApiError if it cannot be verified."""


def tenant_of_key(key: bytes) -> str:
    """The tenant of a key: 32 hex digits."""
    return blake2b(key, digest_size=16).hexdigest()


def key_in(name: bytes, value: bytes) -> bytes:
    """The API key in a header; empty if it holds none."""
    if name == b"x-api-key":
        return value.strip()
    if name != b"authorization":
        return b""
    scheme, _, key = value.strip().partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


async def tenant_in_scope(scope: Scope) -> str:
    """The tenant that `Gate` put into the scope; the one tenant where it did not run."""
    tenant: str = scope.get(TENANT_KEY, SINGLE_TENANT)
    return tenant


class EngineCredentials:
    """Verifies credentials by sending `GET /v1/models` to the engine; caches the verdicts.

    The first request has no credential. If the engine accepts it, all clients are one tenant. If the engine
    refuses it, a request with each client's own credential follows.
    """

    def __init__(
        self,
        send: Callable[[Request], Awaitable[Response]],
        clock: Callable[[], float] = time.monotonic,
        lend: Callable[[tuple[bytes, bytes]], Awaitable[None]] | None = None,
    ) -> None:
        """Start with an empty cache of verdicts.

        Args:
            send: sends a request to the engine, through all of the engine's own checks.
            lend: called with each accepted credential, because discovery of the engine may need one.
        """
        self._send = send
        self._lend = lend
        self._clock = clock
        self._verdicts: OrderedDict[bytes, tuple[asyncio.Task[bool], float]] = OrderedDict()
        """Verifications by a digest of the credential (b"" for none), and when each began. A running one is
        shared by all requests with its credential; one that ended is the verdict for some time."""

    async def tenant_of(self, scope: Scope) -> str:
        """The tenant of a request.

        Raises:
            Unauthorized: the engine requires a credential, and there is none or the engine refuses it.
            EngineUnavailable, EngineTimeout, EngineBroken: the engine gives no verdict.
        """
        if await self._accepts(None):
            return SINGLE_TENANT
        credential = _credential(scope["headers"])
        if credential is None:
            raise Unauthorized(
                "the engine requires an API key: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
            )
        if not await self._accepts(credential):
            raise Unauthorized(
                "the engine refuses this API key: send one that it accepts", code="invalid_api_key"
            )
        if self._lend is not None:
            await self._lend(credential)
        return _tenant_of(credential)

    async def aclose(self) -> None:
        """Cancel the running verifications."""
        await end_tasks(*(task for task, _ in self._verdicts.values()))

    async def _accepts(self, credential: tuple[bytes, bytes] | None) -> bool:
        digest = b"" if credential is None else blake2b(b":".join(credential), digest_size=16).digest()
        task, began = self._verdicts.pop(digest, (None, 0.0))
        last = None
        if task is not None and task.done() and not task.cancelled() and task.exception() is None:
            last = task.result()
        counts_s = OPEN_S if credential is None else ACCEPTED_S if last else REFUSED_S
        if task is None or (task.done() and (last is None or self._clock() >= began + counts_s)):
            task, began = asyncio.create_task(self._ask(credential, last)), self._clock()
            # read, so that asyncio does not warn if all waiting clients have left
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._verdicts[digest] = task, began
        if len(self._verdicts) > REMEMBERED:
            self._verdicts.popitem(last=False)
        # a client that leaves must not cancel the verification for others that wait for it
        return task.result() if task.done() else await asyncio.shield(task)

    async def _ask(self, credential: tuple[bytes, bytes] | None, last: bool | None) -> bool:
        """Whether the engine accepts a credential.

        Args:
            last: its verdict before, None for none. It counts while the engine gives no verdict, so that
                recorded data can be read without an engine.

        Raises:
            ApiError: it gives no verdict, and gave none before.
        """
        try:
            return await self._verdict(credential, TIMEOUT_S if last is None else LAST_WORD_S)
        except ApiError:
            if last is None:
                raise
            return last

    async def _verdict(self, credential: tuple[bytes, bytes] | None, timeout_s: float) -> bool:
        question = Request("GET", _MODELS_PATH, [credential] if credential else [], repeatable=True)
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._send(question)
                await read_and_close(response)
        except TimeoutError as error:
            raise EngineTimeout(
                f"the engine did not answer GET {_MODELS_PATH} within {timeout_s:.0f} s: no credential can "
                "be verified"
            ) from error
        status = response.status
        if 200 <= status < 300:
            return True
        if status in (401, 403):
            return False
        problem = f"the engine answers {status} to GET {_MODELS_PATH}: no credential can be verified"
        raise EngineUnavailable(problem) if status in (429, 503) else EngineBroken(problem)


async def recorded_tenant(headers: Headers, store: Store, *, trusted: bool) -> str | None:
    """The tenant whose record a request may reach while no engine tells whether its credential is valid.

    What a tenant recorded shows that an engine accepted its credential before.

    Args:
        trusted: whether all clients may reach what was recorded without a credential.

    Returns:
        None if nothing was recorded with the credential, and the client is not trusted.

    Raises:
        StoreError: the store does not respond.
    """
    credential = _credential(headers)
    if credential is not None:
        tenant = _tenant_of(credential)
        if await store.sessions(limit=1, tenant=tenant):
            return tenant
    return SINGLE_TENANT if trusted else None


def unverified_tenant(headers: Headers) -> str:
    """The tenant of the credential in a request before anything verified it: for fair queueing alone."""
    credential = _credential(headers)
    return _tenant_of(credential) if credential is not None else SINGLE_TENANT


def _credential(headers: Headers) -> tuple[bytes, bytes] | None:
    for header in _CREDENTIAL_HEADERS:
        for name, value in headers:
            if name == header and value.strip():
                return name, value
    return None


def _tenant_of(credential: tuple[bytes, bytes]) -> str:
    """The tenant of the key in a header of any scheme: `secret` of `Bearer secret`."""
    scheme, _, key = credential[1].strip().partition(b" ")
    return tenant_of_key(key.strip() or scheme)
