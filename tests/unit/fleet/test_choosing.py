from types import SimpleNamespace
from typing import Any

import pytest

from tokenproxy.fleet.choosing import sticky_least_loaded


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
