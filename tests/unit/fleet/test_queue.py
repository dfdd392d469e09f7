"""The fair queue: its order, its bounds, and that no place is lost when clients leave."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.errors import Overloaded
from proxy.fleet.hold import Hold
from proxy.fleet.queue import LOOK_AHEAD, MAX_PASSED_OVER, FairQueue
from tests.support.stepped import elapse, now, settled, stepped


class _Places:
    """Places of several kinds, and the requests that hold one."""

    def __init__(self, *, max_waiting: int = 1000, timeout_s: float = 60.0, **free: int) -> None:
        self.free = Counter(free)
        self.hold = Hold(now)
        self.queue: FairQueue[str] = FairQueue(max_waiting, timeout_s, self.give_back, self.hold, now)
        self.service = Counter[str]()
        """By tenant: the weights of its requests that were served."""

    def give_back(self, kind: str) -> None:
        self.free[kind] += 1

    def release(self, kind: str = "any") -> None:
        self.give_back(kind)
        self.queue.wake()

    def start(self, tenant: str = "a", weight: int = 1, kind: str = "any") -> "asyncio.Task[str]":
        def try_take() -> str | None:
            if not self.free[kind]:
                return None
            self.free[kind] -= 1
            self.service[tenant] += weight
            return kind

        return asyncio.create_task(self.queue.acquire(tenant, weight, try_take, kind))


def _cancel(*tasks: "asyncio.Task[str]") -> None:
    for task in tasks:
        task.cancel()


# --- the order


@stepped
async def test_a_tenant_that_returns_with_large_requests_one_at_a_time_gets_no_more_than_its_share() -> None:
    places = _Places()
    small = [places.start("small", 10) for _ in range(1000)]
    large = places.start("large", 1000)
    await settled()
    for _ in range(300):
        places.release()
        await settled()
        if large.done():
            large = places.start("large", 1000)
            await settled()
    assert abs(places.service["small"] - places.service["large"]) <= 1010, places.service
    _cancel(*small, large)


# --- no place is lost


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.sampled_from("abc"), st.integers(1, 50)),
        st.tuples(st.just("release")),
        st.tuples(st.just("cancel"), st.integers(0, 10**6)),
        # both before the request that is served can run
        st.tuples(st.just("release and cancel"), st.integers(0, 10**6)),
        st.tuples(st.just("cancel and release"), st.integers(0, 10**6)),
    ),
    max_size=60,
)


@settings(derandomize=True)
@given(steps=_STEPS, capacity=st.integers(1, 4))
def test_no_place_is_lost_and_none_stays_free_while_a_request_waits(
    steps: list[tuple[Any, ...]], capacity: int
) -> None:
    @stepped
    async def play() -> None:
        places = _Places(any=capacity)
        waiting = [places.start("abc"[i % 3]) for i in range(capacity + 5)]
        await settled()
        running = sum(task.done() for task in waiting)
        waiting = [task for task in waiting if not task.done()]
        for what, *arguments in steps:
            if what == "start":
                waiting.append(places.start(*arguments))
            victim = waiting[arguments[0] % len(waiting)] if "cancel" in what and waiting else None
            if victim is not None and what != "release and cancel":
                victim.cancel()
            if "release" in what and running:
                running -= 1
                places.release()
            if victim is not None and what == "release and cancel":
                victim.cancel()
            await settled()
            running += sum(task.done() and not task.cancelled() for task in waiting)
            waiting = [task for task in waiting if not task.done()]
            assert places.free["any"] + running == capacity
            assert places.queue.waiting == len(waiting)
            assert not (places.free["any"] and waiting)
        _cancel(*waiting)
        await settled()
        assert (places.queue.waiting, places.free["any"] + running) == (0, capacity)

    play()


@stepped
async def test_who_leaves_when_its_place_was_taken_gives_it_to_the_next() -> None:
    places = _Places()
    first, second = places.start(), places.start()
    await settled()
    places.release()
    first.cancel()
    assert await second == "any"
    with pytest.raises(asyncio.CancelledError):
        await first
    assert places.free["any"] == 0


# --- bounds


@stepped
async def test_a_tenant_that_fills_the_queue_makes_room_for_another() -> None:
    places = _Places(max_waiting=4)
    many = [places.start("many") for _ in range(4)]
    await settled()
    others = [places.start("few") for _ in range(3)]
    await settled()
    # two places for each; the newest requests of who had most are refused
    assert [task.done() for task in many] == [False, False, True, True]
    assert [task.done() for task in others] == [False, False, True]
    for task in (many[2], many[3], others[2]):
        with pytest.raises(Overloaded):
            await task
    _cancel(*many[:2], *others[:2])


@stepped
async def test_a_request_waits_no_longer_than_it_may_and_held_time_does_not_count() -> None:
    places = _Places(timeout_s=8.0, max_waiting=1)
    waiting = places.start()
    await elapse(7.9)
    assert not waiting.done()
    await elapse(0.2)
    with pytest.raises(Overloaded) as refused:
        await waiting
    assert (refused.value.status, refused.value.code) == (429, "queue_timeout")
    assert (b"retry-after", b"1") in refused.value.headers()
    assert places.queue.waiting == 0
    places.hold.begin()
    held = [places.start() for _ in range(3)]
    await elapse(100.0)
    assert not any(task.done() for task in held), "any number may wait then"
    places.hold.end()
    await elapse(7.9)
    places.release()
    assert await held[0] == "any"
    await elapse(2.0)
    assert all(isinstance(task.exception(), Overloaded) for task in held[1:])


@stepped
async def test_a_request_overtakes_those_that_the_free_place_does_not_suit() -> None:
    places = _Places()
    blocked = [places.start("a", kind="any") for _ in range(LOOK_AHEAD - 1)]
    late = places.start("a", kind="other")
    await settled()
    places.release("other")
    assert await late == "other"
    places.give_back("other")
    assert await places.start("a", kind="other") == "other"
    assert places.queue.waiting == len(blocked)
    _cancel(*blocked)


@stepped
async def test_a_request_is_not_passed_over_for_ever() -> None:
    places = _Places()
    large = places.start("a", kind="large")
    await settled()
    small = [places.start(f"t{i}") for i in range(2 * MAX_PASSED_OVER)]
    await settled()
    for _ in small:
        places.release()
    await settled()
    assert sum(task.done() for task in small) == MAX_PASSED_OVER
    places.release("large")
    assert await large == "large"
    await settled()
    assert all(task.done() for task in small)
