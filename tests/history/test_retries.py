import asyncio

import pytest

from proxy.errors import BadRequest
from proxy.history.retries import KEPT_BYTES, Attempt, Retries
from proxy.history.store import Limits, StoreError
from proxy.stores.memory import MemoryStore
from proxy.types import Headers

_AUTH = (b"authorization", b"Bearer a")
_NAMED = (b"idempotency-key", b"k")
_AGAIN = (b"x-stainless-retry-count", b"1")


@pytest.fixture
def retries() -> Retries:
    return Retries(MemoryStore(Limits()))


def _attempt(*headers: tuple[bytes, bytes], body: bytes = b"{}", session: str | None = None) -> Attempt:
    return Attempt(list(headers), body, session)


async def _answer(retries: Retries, attempt: Attempt, body: bytes = b"first") -> None:
    headers: Headers = [(b"x-turn-id", b"1")]
    await retries.done(attempt, 200, headers, body)


def test_what_tells_requests_apart() -> None:
    requests = [
        _attempt(),
        _attempt(body=b"{ }"),
        _attempt(session="s"),
        _attempt(session="{}"),
        _attempt(session="s{}", body=b""),
        _attempt(_AUTH),
        _attempt((b"authorization", b"Bearer b")),
    ]
    assert len({attempt.request for attempt in requests}) == len(requests)
    assert _attempt(_AGAIN).request == _attempt().request == _attempt((b"x-other", b"1")).request
    assert _attempt(session=None).request == _attempt(session="").request


def test_what_tells_keys_apart() -> None:
    keys = [
        _attempt(_NAMED),
        _attempt((b"idempotency-key", b"l")),
        _attempt(_NAMED, _AUTH),
        _attempt(_NAMED, (b"authorization", b"Bearer b")),
        _attempt(),
    ]
    assert len({attempt.key for attempt in keys}) == len(keys)
    assert _attempt(_NAMED).key == _attempt(_NAMED, body=b"other").key


@pytest.mark.parametrize(
    "value, again", [(b"0", False), (b"", False), (b" 0 ", False), (b"1", True), (b"12", True)]
)
def test_who_says_that_it_asks_again(value: bytes, again: bool) -> None:
    assert _attempt((b"x-stainless-retry-count", value)).again is again


async def test_only_those_who_ask_again_get_an_earlier_answer(retries: Retries) -> None:
    assert await retries.begin(_attempt()) is None
    await _answer(retries, _attempt())
    assert await retries.begin(_attempt()) is None
    replay = await retries.begin(_attempt(_AGAIN))
    assert replay is not None
    assert (replay.status, list(replay.headers), replay.body) == (200, [(b"x-turn-id", b"1")], b"first")


async def test_a_failure_is_taken_once(retries: Retries) -> None:
    for _ in range(2):
        await _answer(retries, _attempt())
    await retries.failed(_attempt())
    assert await retries.begin(_attempt(_AGAIN)) is None
    assert await retries.begin(_attempt(_AGAIN)) is not None


async def test_two_failures_are_two_runs(retries: Retries) -> None:
    for _ in range(2):
        await retries.failed(_attempt())
    await _answer(retries, _attempt())
    found = [await retries.begin(_attempt(_AGAIN)) for _ in range(3)]
    assert [replay is None for replay in found] == [True, True, False]


@pytest.mark.parametrize("size, kept", [(KEPT_BYTES, True), (KEPT_BYTES + 1, False)])
async def test_long_answers_are_not_kept(retries: Retries, size: int, kept: bool) -> None:
    attempt = _attempt(_NAMED)
    assert await retries.begin(attempt) is None
    await _answer(retries, attempt, b"a" * size)
    replay = await asyncio.wait_for(retries.begin(attempt), 5)
    assert (replay is not None) is kept


@pytest.mark.parametrize("ending", ["done", "failed", "abandon"])
async def test_whoever_waits_for_a_key_goes_on(retries: Retries, ending: str) -> None:
    attempt = _attempt(_NAMED)
    assert await retries.begin(attempt) is None
    waiting = [asyncio.create_task(retries.begin(attempt)) for _ in range(3)]
    left = asyncio.create_task(retries.begin(attempt))
    await asyncio.sleep(0)
    left.cancel()  # a client that waits may leave
    await asyncio.gather(left, return_exceptions=True)
    assert not any(task.done() for task in waiting)
    if ending == "done":
        await _answer(retries, attempt)
        assert None not in await asyncio.gather(*waiting)
        return
    if ending == "failed":
        await retries.failed(attempt)
    else:
        retries.abandon(attempt)
    done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=5)
    assert ([task.result() for task in done], len(pending)) == ([None], 2)
    await _answer(retries, attempt)
    assert None not in await asyncio.gather(*pending)


async def test_a_key_for_another_request(retries: Retries) -> None:
    attempt = _attempt(_NAMED)
    await retries.begin(attempt)
    await _answer(retries, attempt)
    for _ in range(2):  # and it holds nobody up
        with pytest.raises(BadRequest):
            await asyncio.wait_for(retries.begin(_attempt(_NAMED, body=b"other")), 5)
    assert await retries.begin(attempt) is not None


async def test_a_store_that_fails_holds_nobody_up(retries: Retries, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*args: object) -> None:
        raise StoreError("out of order")

    attempt = _attempt(_NAMED)
    with monkeypatch.context() as patch:
        patch.setattr(retries.store, "answers", fail)
        with pytest.raises(StoreError):
            await retries.begin(attempt)
    assert await asyncio.wait_for(retries.begin(attempt), 5) is None
    with monkeypatch.context() as patch:
        patch.setattr(retries.store, "keep_response", fail)
        with pytest.raises(StoreError):
            await _answer(retries, attempt)
    assert await asyncio.wait_for(retries.begin(attempt), 5) is None
