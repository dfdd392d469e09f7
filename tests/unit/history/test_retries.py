import asyncio

import pytest

from proxy.errors import BadRequest, EngineBroken
from proxy.history.retries import KEPT_BYTES, Attempt, EarlierResponse, Retries
from proxy.history.store import Limits, StoreError
from proxy.history.tasks import Tasks
from proxy.metrics import Metrics
from proxy.stores.memory import MemoryStore
from proxy.turn.request import ChatRequest, RetrySigns
from tests.support.recording import chat_request, session_ref

_SESSION = "s"


@pytest.fixture
def retries() -> Retries:
    return Retries(MemoryStore(Limits()), Metrics(), Tasks())


def _request(
    key: bytes = b"",
    count: bytes = b"0",
    body: bytes = b"{}",
    session: str | None = _SESSION,
    tenant: str = "",
    path: str = "/v1/chat/completions",
) -> ChatRequest:
    signs = RetrySigns(key, count, path, body)
    return chat_request(retry=signs, session=session_ref(session) if session else None, tenant=tenant)


async def _run(retries: Retries, request: ChatRequest, body: bytes = b"first") -> EarlierResponse | None:
    """Serve a request; returns the earlier response if it got one."""
    async with retries.attempt(request) as attempt:
        if attempt.earlier is None:
            await attempt.keep(200, [(b"x-turn-id", b"1")], body)
        return attempt.earlier


async def _kept(retries: Retries) -> int:
    store = retries.store
    assert isinstance(store, MemoryStore)
    keys = [Attempt(retries, _request(count=count)).key for count in (b"0", b"1")]
    return sum([len(await store.responses(key)) for key in set(keys)])


async def test_retry_gets_the_response_of_the_request_it_repeats(retries: Retries) -> None:
    assert await _run(retries, _request()) is None
    assert await _run(retries, _request(), b"second") is None
    earlier = await _run(retries, _request(count=b"1"))
    assert earlier is not None
    assert (earlier.status, list(earlier.headers), earlier.body) == (200, [(b"x-turn-id", b"1")], b"second")


@pytest.mark.parametrize(
    "other",
    [
        {"body": b"{ }"},
        {"session": "other"},
        {"session": None},
        {"tenant": "other"},
        {"path": "/v1/chat/completions/tokens"},
        {"count": b""},
        {"count": b" 0 "},
    ],
)
async def test_other_requests_get_no_stored_response(retries: Retries, other: dict[str, bytes]) -> None:
    await _run(retries, _request())
    assert await _run(retries, _request(**{"count": b"1", **other})) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("session", [None, _SESSION])
async def test_idempotency_key_names_a_request(retries: Retries, session: str | None) -> None:
    assert await _run(retries, _request(b"k", b"", session=session)) is None
    assert await _run(retries, _request(b"k", b"", session=session)) is not None
    assert await _run(retries, _request(b"l", b"", session=session)) is None
    assert await _run(retries, _request(b"k", b"", session=session, tenant="other")) is None


@pytest.mark.parametrize("other", [{"body": b"{ }"}, {"path": "/v1/chat/completions/tokens"}])
async def test_idempotency_key_of_another_request_is_refused(
    retries: Retries, other: dict[str, bytes]
) -> None:
    await _run(retries, _request(b"k"))
    with pytest.raises(BadRequest, match="another request") as refused:
        await _run(retries, _request(b"k", **other))  # type: ignore[arg-type]
    assert refused.value.param == "Idempotency-Key"
    assert await _run(retries, _request(b"k")) is not None


async def test_equal_keys_wait_for_the_first(retries: Retries) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        async with retries.attempt(_request(b"k")) as attempt:
            started.set()
            await go_on.wait()
            await attempt.keep(200, [], b"first")

    running = asyncio.create_task(first())
    await started.wait()
    second = asyncio.create_task(_run(retries, _request(b"k")))
    await asyncio.sleep(0.02)
    assert not second.done()
    go_on.set()
    await running
    earlier = await second
    assert earlier is not None and earlier.body == b"first"


@pytest.mark.parametrize("error", [EngineBroken("x"), ValueError("x"), asyncio.CancelledError()])
async def test_failed_request_is_run_again(retries: Retries, error: BaseException) -> None:
    """And a failure is taken by one retry only."""
    for _ in range(2):
        await _run(retries, _request())
    with pytest.raises(type(error)):
        async with retries.attempt(_request()):
            raise error
    await retries.tasks.aclose()
    assert await _run(retries, _request(count=b"1")) is None
    assert await _run(retries, _request(count=b"1")) is not None


@pytest.mark.parametrize("named", [b"", b"k"])
async def test_failed_request_blocks_no_retry(retries: Retries, named: bytes) -> None:
    with pytest.raises(EngineBroken):
        async with retries.attempt(_request(named)):
            raise EngineBroken("x")
    assert await asyncio.wait_for(_run(retries, _request(named, b"1")), 5) is None


async def test_stream_settles_its_attempt_after_the_block(retries: Retries) -> None:
    async with retries.attempt(_request()) as attempt:
        attempt.hand_over()
    assert attempt.wants_body
    await attempt.keep(200, [], b"stream")
    attempt.abandon()
    earlier = await _run(retries, _request(count=b"1"))
    assert earlier is not None and earlier.body == b"stream"


@pytest.mark.parametrize(
    "request_, kept",
    [
        (_request(), 1),
        (_request(count=b""), 0),
        (_request(session=None), 0),
    ],
)
async def test_response_is_kept_only_where_a_retry_can_come(
    retries: Retries, request_: ChatRequest, kept: int
) -> None:
    await _run(retries, request_)
    assert await _kept(retries) == kept
    assert Attempt(retries, request_).wants_body is bool(kept)


async def test_long_response_is_not_kept(retries: Retries) -> None:
    await _run(retries, _request(), b"x" * (KEPT_BYTES + 1))
    assert await _run(retries, _request(count=b"1"), b"x" * KEPT_BYTES) is None
    assert await _run(retries, _request(count=b"1")) is not None


async def test_failing_store_only_loses_the_retry(retries: Retries, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*args: object) -> None:
        raise StoreError("out of order")

    for name in ("responses", "keep_response"):
        monkeypatch.setattr(retries.store, name, fail)
    for _ in range(2):
        assert await asyncio.wait_for(_run(retries, _request(b"k", b"1")), 5) is None
    assert retries.metrics.registry.get_sample_value("tokenproxy_store_errors_total") == 4.0
