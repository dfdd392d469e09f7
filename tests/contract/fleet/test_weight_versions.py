"""The versions that turns carry are those that sampled them, while a fleet is updated.

The fake engines remember which weights sampled each id. That is compared with what the proxy recorded.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Semaphore

import httpx
import pytest

from tests.support.fake_trained import FakeTrained, Rendezvous, compare_turns, update
from tests.support.tiny_model import HI, TinyModel
from tests.support.utils import run_proxy, wait_until
from tokenproxy.fleet.health import FleetWatch
from tokenproxy.fleet.weight_state import WeightTag
from tokenproxy.turn import stream

_BEFORE = 3
"""Ids of each turn that the first weights sample."""


@pytest.fixture
def start(tiny_model: TinyModel) -> Iterator[Callable[[int], list[FakeTrained]]]:
    """Starts engines whose turns wait for the second weights after some ids."""
    with ExitStack() as stack:

        def start(count: int) -> list[FakeTrained]:
            meeting = Rendezvous(count)
            engines = [stack.enter_context(FakeTrained(tiny_model, meeting)) for _ in range(count)]
            for engine in engines:
                engine.usual.ids = (*HI,) * 4
                engine.waits_at = _BEFORE
                engine.usual.pause_s = 0.02  # the end of a pause is read before the next id arrives
            return engines

        yield start


def _turn(client: httpx.Client, session: str, arrived: Semaphore) -> bytes:
    """Send a turn, as a stream if its session is named so; tells when the first ids have arrived."""
    stream = session.startswith("stream")
    body = {"messages": [{"role": "user", "content": f"Hi {session}"}], "stream": stream}
    with client.stream(
        "POST", "/v1/chat/completions", json=body, headers={"x-session-id": session}
    ) as answer:
        received, events = b"", 0
        for line in answer.iter_lines():
            received += line.encode()
            if line.startswith("data:"):
                events += 1
                if stream and events == 1 + _BEFORE:
                    arrived.release()
    return received


@pytest.mark.parametrize("other", [False, True], ids=["this process", "another process"])
def test_turns_that_an_update_interrupts_carry_both_versions(
    start: Callable[[int], list[FakeTrained]], tmp_path: Path, other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a stream was is known to the process that runs the update, unless it is too busy to see it."""
    monkeypatch.setattr(FleetWatch, "was_late", False)
    monkeypatch.setattr(stream, "_QUIET_S", 0.0)  # the engines update faster than real ones
    engines = start(2)
    store = f"sqlite://{tmp_path}/turns.db"
    streams, whole = [f"stream-{number}" for number in range(4)], ["whole-0", "whole-1"]
    with ExitStack() as stack:
        client = stack.enter_context(run_proxy(engines, store=store))
        trainer = client
        if other:
            trainer = stack.enter_context(run_proxy(engines, store=store))
        pool = stack.enter_context(ThreadPoolExecutor(8))
        arrived = Semaphore(0)
        turns = [pool.submit(_turn, client, session, arrived) for session in (*streams, *whole)]
        for _ in streams:
            assert arrived.acquire(timeout=15)
        wait_until(lambda: _sampled(engines, whole) == [_BEFORE] * 2)
        assert update(trainer, "7", "7") == [200] * 5
        answers = [turn.result() for turn in turns]
        assert all(b"[DONE]" in answer for answer in answers[:4])
        kinds = compare_turns(client, streams, engines)
        # a stream of which something may be on its way is uncertain, never wrong
        assert kinds["mixed"] + kinds["uncertain"] == 4
        assert other or kinds["mixed"]
        assert compare_turns(client, whole, engines) == {"uncertain": 2}
        assert client.get("/ready").json()["weight_version"] == "7"


def _sampled(engines: list[FakeTrained], sessions: list[str]) -> list[int]:
    return [max(len(engine.sampled.get(session, ())) for engine in engines) for session in sessions]


# --- the tag alone


def _paused(tag: WeightTag, arrived: dict[int, int] | None) -> WeightTag:
    """A tag of a stream during which the version became 8, in a pause."""
    tag.progress = lambda: arrived
    tag.named("8", paused=True)
    return tag


def test_a_tag_of_a_stream_that_was_paused() -> None:
    tag = _paused(WeightTag("7", stream=True), {0: 3, 1: 4})
    tag.resumed(tag.progress())
    assert tag.spans(0, 5) == ([("7", 0, 3), ("8", 3, 5)], False)
    assert tag.spans(1, 4) == ([("7", 0, 4)], False)
    assert tag.spans(2, 4) == ([("8", 0, 4)], False), "it had not begun"
    ended = _paused(WeightTag("7", stream=True), {0: 3})
    assert ended.spans(0, 3) == ([("7", 0, 3)], False)
    # more arrived, although the replica should be paused
    assert ended.spans(0, 4) == ([("7", 0, 4), ("8", 0, 4)], True)


def test_a_tag_of_a_position_that_is_unknown() -> None:
    for paused in (True, False):
        tag = WeightTag("7", stream=not paused)
        tag.named("8", paused=paused)
        tag.resumed(None)
        assert tag.spans(0, 4) == ([("7", 0, 4), ("8", 0, 4)], True)
    changing = WeightTag("7", stream=True)
    changing.changing()
    assert changing.spans(0, 4) == ([("7", 0, 4)], True)
