"""Credentials that only the engine can verify: its verdicts, and how long they count."""

import asyncio
import hashlib

import pytest

from tokenproxy.base.errors import ApiError, EngineBroken, EngineUnavailable, Unauthorized
from tokenproxy.base.http import BytesResponse, Request, Response
from tokenproxy.base.types import Headers, Scope
from tokenproxy.web import credentials as module
from tokenproxy.web.credentials import EngineCredentials

_ANNA, _BERT, _EVE = b"Bearer anna", b"Bearer bert", b"Bearer eve"


def _tenant(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


class Engine:
    """Verifies credentials as vLLM does, and has a clock."""

    def __init__(self, *keys: bytes) -> None:
        self.keys = keys
        self.now = 0.0
        self.status: int | None = None
        self.received: list[Headers] = []
        self.gate: asyncio.Event | None = None
        self.credentials = EngineCredentials(self.send, lambda: self.now)

    async def send(self, request: Request) -> Response:
        assert (request.method, request.path, request.body) == ("GET", "/v1/models", b"")
        self.received.append(request.headers)
        if self.gate is not None:
            await self.gate.wait()
        sent = dict(request.headers).get(b"authorization")
        status = self.status or (200 if not self.keys or sent in self.keys else 401)
        return BytesResponse(status, [], b"{}")

    async def tenant(self, value: bytes | None = None, name: bytes = b"authorization") -> str:
        headers = [(b"accept", b"*/*"), *([(name, value)] if value is not None else [])]
        scope: Scope = {"headers": headers}
        return await self.credentials.tenant_of(scope)

    @property
    def asked(self) -> list[bytes]:
        """The credentials of the requests that had one."""
        return [value for headers in self.received for _, value in headers]


async def test_all_clients_are_one_tenant_of_an_engine_without_keys() -> None:
    engine = Engine()
    assert [await engine.tenant(header) for header in (None, _ANNA, None)] == ["", "", ""]
    assert engine.received == [[]]  # once, and nobody's credential with it
    engine.now = module.OPEN_S
    assert await engine.tenant(_ANNA) == ""
    assert engine.received == [[], []]


async def test_each_accepted_key_is_a_tenant_whatever_its_scheme() -> None:
    engine = Engine(_ANNA, _BERT, b"bearer anna", b"anna")
    for _ in range(3):
        assert (await engine.tenant(_ANNA), await engine.tenant(_BERT)) == (_tenant("anna"), _tenant("bert"))
    assert engine.received == [[], [(b"authorization", _ANNA)], [(b"authorization", _BERT)]]
    assert {await engine.tenant(value) for value in (b"bearer anna", b"anna")} == {_tenant("anna")}


@pytest.mark.parametrize("header", [None, b"  ", _EVE])
async def test_a_missing_or_refused_key(header: bytes | None) -> None:
    engine = Engine(_ANNA)
    for _ in range(2):
        with pytest.raises(Unauthorized) as refused:
            await engine.tenant(header)
        assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
        assert (b"www-authenticate", b"Bearer") in refused.value.headers()
    assert engine.asked == ([_EVE] if header == _EVE else [])


async def test_verdicts_expire() -> None:
    engine = Engine(_ANNA, _BERT)
    await engine.tenant(_ANNA)
    engine.keys = (_BERT, _EVE)
    engine.now = module.ACCEPTED_S - 0.1
    assert await engine.tenant(_ANNA) == _tenant("anna")
    engine.now = module.ACCEPTED_S
    with pytest.raises(Unauthorized):
        await engine.tenant(_ANNA)
    engine.keys = (_ANNA,)
    engine.now += module.REFUSED_S - 0.1
    with pytest.raises(Unauthorized):
        await engine.tenant(_ANNA)
    engine.now += 0.1
    assert await engine.tenant(_ANNA) == _tenant("anna")


async def test_the_last_verdict_counts_while_the_engine_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record can be read without an engine, by those that could read it before."""
    engine = Engine(b"Bearer anna")
    assert await engine.tenant(_ANNA) == _tenant("anna")
    engine.status, engine.now = 503, 2 * module.ACCEPTED_S
    assert await engine.tenant(_ANNA) == _tenant("anna")
    with pytest.raises(EngineUnavailable):
        await engine.tenant(_BERT)
    monkeypatch.setattr(module, "LAST_WORD_S", 0.001)
    engine.gate, engine.now = asyncio.Event(), 3 * module.ACCEPTED_S  # it hangs
    assert await engine.tenant(_ANNA) == _tenant("anna")
    engine.gate = None
    engine.status, engine.keys, engine.now = None, (b"Bearer bert",), 4 * module.ACCEPTED_S
    assert await engine.tenant(_BERT) == _tenant("bert")
    with pytest.raises(Unauthorized):
        await engine.tenant(_ANNA)


async def test_concurrent_requests_ask_once() -> None:
    engine = Engine(_ANNA)
    engine.gate = asyncio.Event()
    tasks = [asyncio.create_task(engine.tenant(_ANNA)) for _ in range(10)]
    await asyncio.sleep(0)
    tasks[0].cancel()  # the client that started the verification leaves; the others still get the answer
    await asyncio.sleep(0)
    engine.gate.set()
    assert await asyncio.gather(*tasks[1:]) == [_tenant("anna")] * 9
    assert len(engine.received) == 2


@pytest.mark.parametrize(("status", "kind"), [(500, EngineBroken), (429, EngineUnavailable)])
async def test_other_status_is_not_a_verdict(status: int, kind: type[ApiError]) -> None:
    engine = Engine(_ANNA)
    engine.status = status
    for _ in range(2):
        with pytest.raises(kind, match=f"answers {status} to GET /v1/models"):
            await engine.tenant(_ANNA)
    assert len(engine.received) == 2  # not remembered
    engine.status = None
    assert await engine.tenant(_ANNA) == _tenant("anna")
