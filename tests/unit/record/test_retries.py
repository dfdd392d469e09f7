import asyncio

import pytest
from msgspec.structs import replace

from tests.support.recording import chat_request, session_ref
from tokenproxy.base.errors import BadRequest, Conflict, EngineBroken
from tokenproxy.base.request import ChatRequest, RetrySigns
from tokenproxy.record.history import History
from tokenproxy.record.retries import Attempt, EarlierResponse

_SESSION = "s"


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


async def _run(history: History, request: ChatRequest, body: bytes = b"first") -> EarlierResponse | None:
    """Serve a request; returns the earlier response if it got one."""
    async with Attempt(history, request) as attempt:
        if attempt.earlier is None:
            await attempt.keep(200, [(b"x-turn-id", b"1")], body)
        return attempt.earlier


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
async def test_other_requests_get_no_stored_response(history: History, other: dict[str, bytes]) -> None:
    await _run(history, _request())
    assert await _run(history, _request(**{"count": b"1", **other})) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [{"body": b"{ }"}, {"path": "/v1/chat/completions/tokens"}])
async def test_idempotency_key_of_another_request_is_refused(
    history: History, other: dict[str, bytes]
) -> None:
    await _run(history, _request(b"k"))
    assert await _run(history, _request(b"k", tenant="other")) is None
    with pytest.raises(BadRequest, match="another request") as refused:
        await _run(history, _request(b"k", **other))  # type: ignore[arg-type]
    assert refused.value.param == "Idempotency-Key"
    assert await _run(history, _request(b"k")) is not None


@pytest.mark.parametrize("error", [EngineBroken("x"), ValueError("x"), asyncio.CancelledError()])
async def test_failed_request_is_run_again(history: History, error: BaseException) -> None:
    """And a failure is taken by one retry only."""
    for _ in range(2):
        await _run(history, _request())
    with pytest.raises(type(error)):
        async with Attempt(history, _request()):
            raise error
    await history.tasks.aclose()
    assert await _run(history, _request(count=b"1")) is None
    assert await _run(history, _request(count=b"1")) is not None


async def test_who_waited_is_checked_again_where_a_key_may_have_ended(history: History) -> None:
    """It sends the request again, as SDKs do after a 409."""
    waits = replace(_request(b"k"), must_record=True)
    async with Attempt(history, waits) as first:
        waiting = asyncio.create_task(_run(history, waits))
        await asyncio.sleep(0)
        await first.fail(502)
    with pytest.raises(Conflict):
        await waiting
    assert await _run(history, waits) is None
