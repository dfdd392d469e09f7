"""The fair queue: its order, its bounds, and that no place is lost when clients leave."""

import asyncio
import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.stepped import elapse, now, settled, stepped
from tokenproxy.base.errors import ApiError, EngineUnavailable, Overloaded
from tokenproxy.fleet.queue import FairQueue, Lack, Priority, Suspension


class _Places:
    """Places, and the requests that hold one."""

    def __init__(self, *, max_waiting: int = 1000, timeout_s: float = 60.0, free: int = 0) -> None:
        self.free = free
        self.suspension = Suspension(now)
        self.queue: FairQueue[bool] = FairQueue(max_waiting, timeout_s, self.give_back, self.suspension, now)
        self.tried = 0
        self.served: list[tuple[str, int]] = []
        """Tenant and number of each request in the order of service."""
        self._number = 0

    def give_back(self, taken: bool = True) -> None:
        self.free += 1

    def release(self) -> None:
        self.give_back()
        self.queue.wake()

    def start(self, tenant: str = "a") -> "asyncio.Task[bool]":
        self._number += 1
        number = self._number

        def try_take() -> bool | None:
            self.tried += 1
            if not self.free:
                return None
            self.free -= 1
            self.served.append((tenant, number))
            return True

        return asyncio.create_task(self.queue.acquire(tenant, try_take))


def _cancel(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()


# --- the order


@stepped
async def test_requests_of_a_tenant_are_served_in_their_order() -> None:
    places = _Places(free=1)
    tasks = [places.start() for _ in range(4)]
    await settled()
    assert tasks[0].done(), "a free place is taken without waiting"
    for _ in tasks[1:]:
        places.release()
    await asyncio.gather(*tasks)
    assert [number for _, number in places.served] == [1, 2, 3, 4]
    assert (places.free, places.queue.waiting) == (0, 0)


@stepped
async def test_a_tenant_that_returns_with_one_request_at_a_time_gets_no_more_than_its_share() -> None:
    places = _Places()
    many = [places.start("many") for _ in range(1000)]
    single = places.start("single")
    await settled()
    for _ in range(300):
        places.release()
        await settled()
        if single.done():
            single = places.start("single")
            await settled()
    served = Counter(tenant for tenant, _ in places.served)
    assert abs(served["many"] - served["single"]) <= 1, served
    _cancel(*many, single)


@stepped
async def test_tenants_of_one_request_each_do_not_starve_others() -> None:
    places = _Places()
    backlog = [places.start("backlog") for _ in range(100)]
    await settled()
    fresh = []
    for number in range(200):
        fresh += [places.start(f"t{number}-{i}") for i in range(2)]
        await settled()
        for _ in range(2):
            places.release()
        await settled()
    # its share shrinks, because two tenants come for two places, and those not served compete as well
    assert Counter(tenant for tenant, *_ in places.served)["backlog"] > 12
    _cancel(*backlog, *fresh)


@stepped
async def test_a_tenant_that_was_idle_gets_no_credit_for_that_time() -> None:
    places = _Places()
    busy = [places.start("busy") for _ in range(200)]
    await settled()
    for _ in range(100):
        places.release()
    back = [places.start("back") for _ in range(100)]
    await settled()
    for _ in range(20):
        places.release()
    assert abs(Counter(tenant for tenant, *_ in places.served[100:])["back"] - 10) <= 1
    _cancel(*busy, *back)


_COUNTS = st.integers(1, 40)


@settings(derandomize=True)
@given(first=_COUNTS, second=_COUNTS, third=_COUNTS)
def test_tenants_that_wait_are_served_equally_often(first: int, second: int, third: int) -> None:
    @stepped
    async def serve_all() -> None:
        places = _Places()
        left = Counter(a=first, b=second, c=third)
        order = list(left.elements())
        random.Random(len(order)).shuffle(order)
        tasks = [places.start(tenant) for tenant in order]
        await settled()
        served = Counter[str]()
        for _ in tasks:
            places.release()
            tenant, _ = places.served[-1]
            served[tenant] += 1
            left[tenant] -= 1
            waiting = [served[name] for name in left if left[name]]
            assert not waiting or max(waiting) - min(waiting) <= 1
        await asyncio.gather(*tasks)

    serve_all()


# --- no place is lost


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.sampled_from("abc")),
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
        places = _Places(free=capacity)
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
            assert places.free + running == capacity
            assert places.queue.waiting == len(waiting)
            assert not (places.free and waiting)
        _cancel(*waiting)
        await settled()
        assert (places.queue.waiting, places.free + running) == (0, capacity)

    play()


@stepped
async def test_who_leaves_when_its_place_was_taken_gives_it_to_the_next() -> None:
    places = _Places()
    first, second = places.start(), places.start()
    await settled()
    places.release()
    first.cancel()
    assert await second
    with pytest.raises(asyncio.CancelledError):
        await first
    assert places.free == 0


@stepped
async def test_an_error_of_try_take_goes_to_its_own_request_and_the_next_is_served() -> None:
    places = _Places()
    gone = False

    def try_take() -> bool | None:
        if gone:
            raise EngineUnavailable("the replica is gone")
        return None

    failing = asyncio.create_task(places.queue.acquire("a", try_take))
    await settled()
    following = [places.start("a"), places.start("b")]
    await settled()
    gone = True
    places.give_back()
    places.release()
    with pytest.raises(ApiError, match="gone"):
        await failing
    assert await asyncio.gather(*following) == [True, True]


# --- bounds


@stepped
async def test_a_full_queue_refuses_with_429_and_when_to_retry() -> None:
    places = _Places(max_waiting=2)
    tasks = [places.start(), places.start()]
    await settled()
    with pytest.raises(Overloaded) as refused:
        await places.start()
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert (b"retry-after", b"2") in refused.value.headers()
    tasks[0].cancel()
    await settled()
    third = places.start()
    await settled()
    assert not third.done()
    _cancel(*tasks, third)
    none_waits = _Places(max_waiting=0, free=1)
    await none_waits.start()
    with pytest.raises(Overloaded):
        await none_waits.start()


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
    assert (b"retry-after", b"2") in refused.value.headers()
    assert places.queue.waiting == 0
    places.suspension.begin()
    held = [places.start() for _ in range(3)]
    await elapse(100.0)
    assert not any(task.done() for task in held), "any number may wait then"
    places.suspension.end()
    await elapse(7.9)
    places.release()
    assert await held[0]
    await elapse(2.0)
    assert all(isinstance(task.exception(), Overloaded) for task in held[1:])


@stepped
async def test_the_first_in_line_is_tried_alone_however_many_wait() -> None:
    places = _Places()
    tasks = [places.start("ab"[i % 2]) for i in range(200)]
    await settled()
    places.tried = 0
    places.release()
    assert places.tried == 2
    tasks.append(places.start("new"))
    await settled()
    assert places.tried == 2
    _cancel(*tasks)


# --- room


class _Room:
    """Room that requests need so much of, each of which is served once."""

    def __init__(self, free: int, *, told: bool = True) -> None:
        """`told`: whether the queue is told how much room is free."""
        self.free = free
        self.tried = 0
        self.served: list[str] = []
        """Tenants in the order of service."""
        self.queue: FairQueue[int] = FairQueue(
            100_000, 120.0, self.give_back, clock=now, room=lambda: self.free if told else math.inf
        )

    def give_back(self, need: int) -> None:
        self.free += need

    def start(self, tenant: str, need: int, priority: Priority = Priority.NEW) -> "asyncio.Task[int]":
        lack = Lack()

        def try_take() -> int | None:
            self.tried += 1
            lack.room = need if need > self.free else 0
            if lack.room:
                return None
            self.free -= need
            self.served.append(tenant)
            return need

        return asyncio.create_task(self.queue.acquire(tenant, try_take, priority, lack=lack))

    async def release(self, need: int) -> None:
        self.give_back(need)
        self.queue.wake()
        await settled()


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("priority", [Priority.RETURNING, Priority.NEW])
@stepped
async def test_what_fits_is_served_before_a_larger_one_and_tenants_take_turns_then_too(
    priority: Priority, told: bool
) -> None:
    room = _Room(10, told=told)
    large = room.start("large", 1000, priority)
    await settled()
    fits = room.start("large", 10)
    await settled()
    assert (fits.done(), large.done()) == (True, False)
    tasks = [room.start(tenant, need) for tenant in ("many", "few") for need in [30, 20] * 20]
    await settled()
    room.served.clear()
    for _ in range(20):
        await room.release(30)
    # "few" is not behind, though what it waits for came later
    counts = Counter(room.served)
    assert counts["large"] == 0 and abs(counts["many"] - counts["few"]) <= 1 and sum(counts.values()) >= 20
    await room.release(1000)
    assert large.done()
    _cancel(*tasks)


@stepped
async def test_waking_many_tries_each_about_once() -> None:
    room = _Room(0)
    draw = random.Random(1)
    needs = [draw.choice([20, 5_000, 15_000]) for _ in range(3_000)]
    tasks = [room.start(f"t{number % 7}", need) for number, need in enumerate(needs)]
    await settled()
    assert room.tried <= 2 * len(needs), "each where it comes"
    room.tried = 0
    for _ in range(1_000):
        await room.release(0)
    assert room.tried == 0, "nothing became free"
    small = needs.count(20)
    while len(room.served) < small:
        await room.release(20 * min(249, small - len(room.served)))  # less than the next size
    assert (len(room.served), room.tried) == (small, small)
    for need in (5_000, 15_000):
        for _ in range(needs.count(need)):
            await room.release(need)
    assert all(task.done() for task in tasks)
    assert room.tried <= 2 * len(needs)
