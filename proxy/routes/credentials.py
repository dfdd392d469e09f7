"""Whose request it is. A tenant is a digest of a credential that somebody verified.

Nobody continues, lists, reads, rewards or deletes what another tenant recorded. Where nobody asks for
credentials, everybody is one tenant, the empty string.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b

from proxy.errors import EngineBroken, EngineTimeout, EngineUnavailable, Unauthorized
from proxy.http import Request, Response
from proxy.types import Headers, Scope

SCOPE_KEY = "tokenproxy.tenant"
"""Where the ASGI scope of a request holds its tenant, once one of the proxy's own keys was verified."""
EVERYBODY = ""

OPEN_S = 60.0
"""How long the engine's word counts on whether it wants credentials at all."""
ACCEPTED_S = 300.0
REFUSED_S = 10.0
REMEMBERED = 4096
"""Credentials whose verdict is remembered; the least recently used are forgotten first."""
TIMEOUT_S = 60.0

_MODELS_PATH = "/v1/models"
_CREDENTIAL_HEADERS = (b"authorization", b"x-api-key")

TenantOf = Callable[[Scope], Awaitable[str]]
"""The tenant of a request. Raises Unauthorized, or ApiError where it cannot be known."""


def tenant_of_key(key: bytes) -> str:
    """The tenant of a key: 32 hex digits."""
    return blake2b(key, digest_size=16).hexdigest()


async def everybody(scope: Scope) -> str:
    """The one tenant where nobody asks for credentials."""
    return EVERYBODY


async def tenant_in_scope(scope: Scope) -> str:
    """The tenant that the middleware `ApiKeys` put into the scope."""
    tenant: str | None = scope.get(SCOPE_KEY)
    if tenant is None:
        raise Unauthorized(
            "send an API key of this proxy as `Authorization: Bearer KEY`", code="invalid_api_key"
        )
    return tenant


@dataclass(frozen=True, slots=True)
class _Verdict:
    accepted: bool
    until: float
    """On the clock of `time.monotonic`."""


class EngineCredentials:
    """Lets the engine verify credentials: it is asked `GET /v1/models`, and its word remembered for a while.

    First without a credential: an engine that answers wants none, and everybody is one tenant. If it refuses,
    it is asked once more with each client's own credential.
    """

    def __init__(
        self,
        send: Callable[[Request], Awaitable[Response]],
        clock: Callable[[], float] = time.monotonic,
        lend: Callable[[tuple[bytes, bytes]], Awaitable[None]] | None = None,
    ) -> None:
        """An empty cache of verdicts.

        Args:
            send: sends a request to the engine, through everything that guards it.
            lend: called with each accepted credential: what the engine can do may not be known without one.
        """
        self._send = send
        self._lend = lend
        self._clock = clock
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._without: _Verdict | None = None
        """The verdict on a request without a credential."""
        self._asking: dict[bytes, asyncio.Task[bool]] = {}
        """Questions under way, so that concurrent requests with one credential ask once."""

    async def tenant_of(self, scope: Scope) -> str:
        """The tenant of a request.

        Raises:
            Unauthorized: the engine wants a credential, and there is none or the engine refuses it.
            EngineUnavailable, EngineTimeout, EngineBroken: the engine does not tell.
        """
        if await self._accepts(None):
            return EVERYBODY
        credential = _credential(scope["headers"])
        if credential is None:
            raise Unauthorized(
                "the engine wants an API key: send it as `Authorization: Bearer KEY`", code="invalid_api_key"
            )
        if not await self._accepts(credential):
            raise Unauthorized("the engine refuses this API key", code="invalid_api_key")
        if self._lend is not None:
            await self._lend(credential)
        return tenant_of_key(_key(credential[1]))

    async def aclose(self) -> None:
        """Give up the questions under way."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _accepts(self, credential: tuple[bytes, bytes] | None) -> bool:
        digest = b"" if credential is None else blake2b(b":".join(credential), digest_size=16).digest()
        verdict = self._verdicts.get(digest) if credential else self._without
        if verdict is not None and self._clock() < verdict.until:
            if credential:
                self._verdicts.move_to_end(digest)
            return verdict.accepted
        task = self._asking.get(digest)
        if task is None:
            task = asyncio.create_task(self._ask(digest, credential))
            self._asking[digest] = task
            task.add_done_callback(lambda done: self._asked(digest, done))
        # a client that leaves must not take the answer away from the others that wait for it
        return await asyncio.shield(task)

    async def _ask(self, digest: bytes, credential: tuple[bytes, bytes] | None) -> bool:
        status = await self._status(credential)
        if 200 <= status < 300:
            accepted = True
        elif status in (401, 403):
            accepted = False
        else:
            problem = f"the engine answers {status} to GET {_MODELS_PATH}: no credential can be verified"
            raise EngineUnavailable(problem) if status in (429, 503) else EngineBroken(problem)
        if credential is None:
            self._without = _Verdict(accepted, self._clock() + OPEN_S)
        else:
            self._verdicts[digest] = _Verdict(
                accepted, self._clock() + (ACCEPTED_S if accepted else REFUSED_S)
            )
            self._verdicts.move_to_end(digest)
            while len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)
        return accepted

    async def _status(self, credential: tuple[bytes, bytes] | None) -> int:
        question = Request("GET", _MODELS_PATH, [credential] if credential else [], repeatable=True)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                response = await self._send(question)
                try:
                    await response.read()
                finally:
                    await response.aclose()
        except TimeoutError as error:
            raise EngineTimeout(
                f"the engine did not answer GET {_MODELS_PATH} within {TIMEOUT_S:.0f} s: no credential can "
                "be verified"
            ) from error
        return response.status

    def _asked(self, digest: bytes, task: "asyncio.Task[bool]") -> None:
        del self._asking[digest]
        if not task.cancelled():
            task.exception()  # asked for so that asyncio does not warn when all who waited have left


def _credential(headers: Headers) -> tuple[bytes, bytes] | None:
    for wanted in _CREDENTIAL_HEADERS:
        for name, value in headers:
            if name == wanted and value.strip():
                return name, value
    return None


def _key(value: bytes) -> bytes:
    """The key in a header: `secret` of `Bearer secret`, whatever the scheme is."""
    scheme, _, key = value.strip().partition(b" ")
    return key.strip() or scheme
