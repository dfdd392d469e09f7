from types import SimpleNamespace
from typing import Any

from chat_tokenizer import ids
from tokenproxy.fleet.affinity import PrefixCaches
from tokenproxy.fleet.fleet import Fleet

_A: Any = SimpleNamespace(name="a")
_B: Any = SimpleNamespace(name="b")


def _caches() -> PrefixCaches:
    fleet = Fleet([])
    fleet.replicas += [_A, _B]
    return fleet.prefix_caches


def test_the_replica_with_the_longest_beginning_holds_it() -> None:
    caches = _caches()
    shared, own = list(range(1000, 1600)), list(range(5000, 6000))
    caches.note(ids.dump(shared + own), _A)
    caches.note(ids.dump([*shared, *range(7000, 8000)]), _B)
    holders, share = caches.find(ids.dump([*shared, *own, 1, 2, 3]))
    assert holders == ["a"]
    assert 0.5 < share <= 1
    holders, share = caches.find(ids.dump(shared + [9] * 1000))
    assert holders == ["a", "b"], "all that share the beginning"
    assert share < 0.5


def test_short_and_unknown_prompts_have_no_holder() -> None:
    caches = _caches()
    caches.note(b"[1,2,3]", _A)
    assert caches.find(b"[1,2,3,4]") == ([], 0.0)
    assert caches.find(ids.dump(list(range(1000)))) == ([], 0.0)


def test_a_replica_whose_cache_was_cleared_holds_nothing() -> None:
    caches, prompt = _caches(), b"1," * 4096
    caches.note(prompt, _A)
    caches.note(prompt, _B)
    caches.forget(_B)
    assert caches.find(prompt)[0] == ["a"]
    caches.forget(_A)
    assert caches.find(prompt) == ([], 0.0)
    caches.note(prompt, _B)
    assert caches.find(prompt)[0] == ["b"]
