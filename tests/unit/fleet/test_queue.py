"""The fair queue: its order, its bounds, and that no place is lost when clients leave."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import ApiError, EngineUnavailable, Overloaded
from proxy.fleet.queue import LOOK_AHEAD, MAX_PASSED_OVER, FairQueue, FlowKey


class Places:
    """Places of several kinds, and the requests that hold one."""

    def __init__(self, *, max_waiting: int = 1000, timeout_s: float = 60.0, **free: int) -> None:
        self.free = Counter(free)
        self.queue: FairQueue[str] = FairQueue(max_waiting, timeout_s, self.give_back)
        self.tried = 0
        self.served: list[tuple[str, str, int, int]] = []
        """Tenant, session, weight and number of each request in the order of service."""
        self._number = 0

    def give_back(self, kind: str) -> None:
        self.free[kind] += 1

    def release(self, kind: str = "any") -> None:
        self.give_back(kind)
        self.queue.wake()

    def start(
        self, tenant: str = "a", session: str = "s", weight: int = 1, kind: str = "any"
    ) -> "asyncio.Task[str]":
        self._number += 1
        number = self._number

        def try_take() -> str | None:
            self.tried += 1
            if not self.free[kind]:
                return None
            self.free[kind] -= 1
            self.served.append((tenant, session, weight, number))
            return kind

        return asyncio.create_task(self.queue.acquire(FlowKey(tenant, session), weight, try_take, kind))


async def settled() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    def wrapper(*args: Any) -> None:
        asyncio.run(test(*args))

    wrapper.__name__ = test.__name__
    return wrapper


@in_loop
async def test_a_free_place_is_taken_without_waiting() -> None:
    places = Places(any=1)
    assert await places.start() == "any"
    assert (places.free["any"], places.queue.waiting) == (0, 0)


@in_loop
async def test_requests_of_a_session_are_served_in_their_order() -> None:
    places = Places()
    tasks = [places.start(weight=weight) for weight in (9, 1, 5, 2)]
    await settled()
    for _ in tasks:
        places.release()
    await asyncio.gather(*tasks)
    assert [number for *_, number in places.served] == [1, 2, 3, 4]


@in_loop
async def test_a_tenant_with_one_request_does_not_wait_for_all_of_another() -> None:
    places = Places()
    many = [places.start("many", f"s{i}") for i in range(100)]
    await settled()
    one = places.start("one")
    await settled()
    for _ in range(2):
        places.release()
    await one
    for _ in many[1:]:
        places.release()
    await asyncio.gather(*many)


@in_loop
async def test_a_session_does_not_wait_for_all_of_another_session_of_its_tenant() -> None:
    places = Places()
    many = [places.start("a", "many", 10) for _ in range(50)]
    await settled()
    one = places.start("a", "one", 1000)
    await settled()
    for _ in range(2):
        places.release()
    await one
    for task in many:
        task.cancel()


@in_loop
async def test_a_tenant_that_returns_with_large_requests_one_at_a_time_gets_no_more_than_its_share() -> None:
    places = Places()
    small = [places.start("small", f"s{i}", 10) for i in range(2000)]
    large = places.start("large", "s", 1000)
    await settled()
    for _ in range(400):
        places.release()
        await settled()
        if large.done():
            large = places.start("large", "s", 1000)
            await settled()
    service = Counter[str]()
    for tenant, _, weight, _ in places.served:
        service[tenant] += weight
    assert abs(service["small"] - service["large"]) <= 1010, service
    for task in [*small, large]:
        task.cancel()


@in_loop
async def test_sessions_that_return_with_one_request_each_leave_others_their_share() -> None:
    places = Places()
    backlog = [places.start("a", "backlog", 10) for _ in range(500)]
    agents = {f"s{i}": places.start("a", f"s{i}", 10) for i in range(20)}
    await settled()
    for _ in range(420):
        places.release()
        await settled()
        for name, task in agents.items():
            if task.done():
                agents[name] = places.start("a", name, 10)
        await settled()
    served = Counter(session for _, session, *_ in places.served)
    assert abs(served["backlog"] - 20) <= 1, served
    for task in [*backlog, *agents.values()]:
        task.cancel()


@in_loop
async def test_sessions_of_one_request_each_do_not_starve_others() -> None:
    places = Places()
    backlog = [places.start("a", "backlog", 10) for _ in range(500)]
    await settled()
    fresh = []
    for number in range(1000):
        fresh += [places.start("a", f"s{number}-{i}", 10) for i in range(2)]
        await settled()
        for _ in range(2):
            places.release()
        await settled()
    served = Counter(session for _, session, *_ in places.served)
    # its share shrinks, because two sessions come for two places, and those not served compete as well
    assert served["backlog"] > 30
    for task in [*backlog, *fresh]:
        task.cancel()


@in_loop
async def test_a_tenant_that_was_idle_gets_no_credit_for_that_time() -> None:
    places = Places()
    busy = [places.start("busy", f"s{i}", 10) for i in range(200)]
    await settled()
    for _ in range(100):
        places.release()
    back = [places.start("back", f"s{i}", 10) for i in range(100)]
    await settled()
    for _ in range(20):
        places.release()
    assert abs(Counter(tenant for tenant, *_ in places.served[100:])["back"] - 10) <= 1
    for task in [*busy, *back]:
        task.cancel()


_REQUESTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 100)), min_size=1, max_size=60)


@given(first=_REQUESTS, second=_REQUESTS, third=_REQUESTS)
def test_service_of_tenants_that_wait_differs_by_no_more_than_two_requests(
    first: list[tuple[int, int]], second: list[tuple[int, int]], third: list[tuple[int, int]]
) -> None:
    async def serve_all() -> None:
        places = Places()
        requests = {"a": first, "b": second, "c": third}
        order = [(name, *request) for name, of_tenant in requests.items() for request in of_tenant]
        random.Random(len(order)).shuffle(order)
        tasks = [places.start(name, f"s{session}", weight) for name, session, weight in order]
        await settled()
        left = Counter({name: len(of_tenant) for name, of_tenant in requests.items()})
        largest = {name: max(weight for _, weight in of_tenant) for name, of_tenant in requests.items()}
        service = Counter[str]()
        for _ in tasks:
            places.release()
            tenant, _, weight, _ = places.served[-1]
            service[tenant] += weight
            left[tenant] -= 1
            waiting = [name for name in left if left[name]]
            for one in waiting:
                for other in waiting:
                    assert service[one] - service[other] <= largest[one] + largest[other]
        await asyncio.gather(*tasks)

    asyncio.run(serve_all())


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.sampled_from("abc"), st.sampled_from("xy"), st.integers(1, 50)),
        st.tuples(st.just("release")),
        st.tuples(st.just("cancel"), st.integers(0, 10**6)),
        # both before the request that is served can run
        st.tuples(st.just("release and cancel"), st.integers(0, 10**6)),
        st.tuples(st.just("cancel and release"), st.integers(0, 10**6)),
    ),
    max_size=60,
)


@given(steps=_STEPS, capacity=st.integers(1, 4))
def test_no_place_is_lost_and_none_stays_free_while_a_request_waits(
    steps: list[tuple[Any, ...]], capacity: int
) -> None:
    async def play() -> None:
        places = Places(any=capacity)
        waiting = [places.start("abc"[i % 3], "xy"[i % 2]) for i in range(capacity + 5)]
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
        for task in waiting:
            task.cancel()
        await settled()
        assert (places.queue.waiting, places.free["any"] + running) == (0, capacity)

    asyncio.run(play())


@in_loop
async def test_who_leaves_when_its_place_was_taken_gives_it_to_the_next() -> None:
    places = Places()
    first, second = places.start(), places.start()
    await settled()
    places.release()
    first.cancel()
    assert await second == "any"
    with pytest.raises(asyncio.CancelledError):
        await first
    assert places.free["any"] == 0


@in_loop
async def test_a_full_queue_refuses_with_429_and_when_to_retry() -> None:
    places = Places(max_waiting=2)
    tasks = [places.start(), places.start()]
    await settled()
    with pytest.raises(Overloaded) as refused:
        await places.start()
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert (b"retry-after", b"1") in refused.value.headers()
    tasks[0].cancel()
    await settled()
    third = places.start()
    await settled()
    assert not third.done()
    for task in [*tasks, third]:
        task.cancel()


@in_loop
async def test_a_queue_of_no_requests_lets_none_wait() -> None:
    places = Places(max_waiting=0, any=1)
    await places.start()
    with pytest.raises(Overloaded):
        await places.start()


@in_loop
async def test_a_tenant_that_fills_the_queue_makes_room_for_another() -> None:
    places = Places(max_waiting=4)
    many = [places.start("many", f"s{i}") for i in range(4)]
    await settled()
    others = [places.start("few", f"s{i}") for i in range(3)]
    await settled()
    # two places for each; the newest requests of who had most are refused
    assert [task.done() for task in many] == [False, False, True, True]
    assert [task.done() for task in others] == [False, False, True]
    for task in (many[2], many[3], others[2]):
        with pytest.raises(Overloaded):
            await task
    for task in [*many[:2], *others[:2]]:
        task.cancel()


@in_loop
async def test_a_request_waits_no_longer_than_it_may() -> None:
    places = Places(timeout_s=0.02)
    with pytest.raises(Overloaded) as refused:
        await places.start()
    assert (refused.value.status, refused.value.code) == (429, "queue_timeout")
    assert places.queue.waiting == 0
    places.release()
    assert places.free["any"] == 1


@in_loop
async def test_an_error_of_try_take_goes_to_its_own_request_and_the_next_is_served() -> None:
    places = Places()
    gone = False

    def try_take() -> str | None:
        if gone:
            raise EngineUnavailable("the replica is gone")
        return None

    failing = asyncio.create_task(places.queue.acquire(FlowKey("a", "s"), 1, try_take))
    await settled()
    following = [places.start("a", "s"), places.start("b", "s")]
    await settled()
    gone = True
    places.give_back("any")
    places.release()
    with pytest.raises(ApiError, match="gone"):
        await failing
    assert await asyncio.gather(*following) == ["any", "any"]


@in_loop
async def test_a_request_overtakes_those_that_the_free_place_does_not_suit() -> None:
    places = Places(other=1)
    blocked = [places.start("a", f"s{i}", kind="any") for i in range(LOOK_AHEAD - 1)]
    await settled()
    assert await places.start("a", "late", kind="other") == "other"
    assert places.queue.waiting == len(blocked)
    for task in blocked:
        task.cancel()


@in_loop
async def test_a_request_is_not_passed_over_for_ever() -> None:
    places = Places()
    large = places.start("a", "large", kind="large")
    await settled()
    small = [places.start("a", f"s{i}") for i in range(2 * MAX_PASSED_OVER)]
    await settled()
    for _ in small:
        places.release()
    await settled()
    assert sum(task.done() for task in small) == MAX_PASSED_OVER
    places.release("large")
    assert await large == "large"
    await settled()
    assert all(task.done() for task in small)


@in_loop
async def test_a_wake_tries_few_requests_however_many_wait() -> None:
    places = Places()
    tasks = [places.start("ab"[i % 2], f"s{i}") for i in range(500)]
    await settled()
    places.tried = 0
    places.queue.wake()
    assert places.tried == 1, "a request no heavier than another that found no place is not tried"
    places.tried = 0
    places.release()
    assert places.tried == 2
    for task in tasks:
        task.cancel()


@in_loop
async def test_a_new_request_tries_a_place_for_itself_alone() -> None:
    places = Places()
    tasks = [places.start(f"t{i}") for i in range(100)]
    await settled()
    places.tried = 0
    tasks.append(places.start("new"))
    await settled()
    assert places.tried <= 2
    for task in tasks:
        task.cancel()


@in_loop
async def test_nothing_is_kept_of_tenants_and_sessions_that_are_gone() -> None:
    places = Places()
    blocker = places.start("blocker")
    await settled()
    for i in range(1000):
        task = places.start(f"t{i}", f"s{i}", weight=10**6)
        await settled()
        if i % 2:
            task.cancel()
        else:
            places.release()
        await settled()
        if blocker.done():
            blocker = places.start("blocker")
            await settled()
    level = places.queue._level
    assert len(level._heap) < 200
    blocker.cancel()
    await settled()
    while places.queue.waiting:
        places.release()
        await settled()
    assert not places.queue._level.flows
