import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tokenproxy.fleet.choosing import sticky_least_loaded
from tokenproxy.fleet.load import Load


def _replica(name: str, requests: int) -> Any:
    return SimpleNamespace(name=name, load=SimpleNamespace(requests=requests))


@pytest.mark.parametrize(
    ("requests", "holder", "chosen"),
    [
        ({"a": 0}, "", "a"),
        ({"a": 3, "b": 2}, "", "b"),
        ({"a": 24, "b": 10}, "a", "a"),
        ({"a": 25, "b": 10}, "a", "b"),
        ({"a": 4, "b": 0}, "a", "a"),
        ({"a": 5, "b": 0}, "a", "b"),
        ({"b": 9, "c": 0}, "a", "c"),
    ],
)
def test_the_holder_is_chosen_unless_it_is_far_busier(
    requests: dict[str, int], holder: str, chosen: str
) -> None:
    replicas = [_replica(name, count) for name, count in requests.items()]
    assert sticky_least_loaded(replicas, holder, lambda name: 0).name == chosen


def test_a_load_counts_requests_and_a_pause_is_no_silence() -> None:
    time = [100.0]
    load = Load(lambda: time[0])
    first, second = load.begin(60), load.begin(1)
    first.samples = True
    assert load.requests == 2
    load.end(second)
    load.end(second)
    assert load.requests == 1
    time[0] += 30
    assert load.silent_s() == 30
    load.shift(10)
    assert load.silent_s() == 0
    load.answered(first)
    assert load.usual_silence_s() == 0


def test_a_silence_is_usual_as_long_as_prompts_take_to_read() -> None:
    time = [0.0]
    load = Load(lambda: time[0])
    lease = load.begin(100)
    time[0] += 2
    load.answered(lease)
    load.end(lease)
    assert load.usual_silence_s() == 2
    load.begin(1000).deadline = asyncio.Timeout(None)
    assert load.usual_silence_s() == pytest.approx(20)
